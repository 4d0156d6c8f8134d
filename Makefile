# Thin wrappers for those who type make; ./dev and the commands in benchmarks/ do the work and take arguments.
#
#   make gpu-test  [PART=name]                       the tests that need a GPU; PART=list says what the parts are,
#                                                    and about how many seconds each takes
#   make gpu-bench [PART=name] [QUICK=1] [TUNE=1]    the GPU benchmark, likewise; PART=float8: layers in FP8 alone
#   make gpu-test RANKS=n, make gpu-bench RANKS=n    those of several GPUs of one machine, on n of them
#   make gpu-docs                                    the records in benchmarks/results into docs/performance.md, and plots
#
# COMMIT=name says what is measured where the tree is no git repository; RECORD=file where to write.
.PHONY: train test lint gpu-test gpu-bench gpu-docs

PYTHON := $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)
CHOSEN = $(if $(PART),--part $(PART)) $(if $(COMMIT),--commit $(COMMIT)) $(if $(RECORD),--record $(RECORD))

train:
	./dev train

test:
	./dev test

lint:
	./dev lint

gpu-test:
	$(PYTHON) -m benchmarks.gpu.tests $(CHOSEN) $(if $(RANKS),--ranks $(RANKS))

FLOAT8_RECORD = $(if $(QUICK),,--record $(if $(RECORD),$(dir $(RECORD)),benchmarks/results))
gpu-bench:
ifneq ($(PART),float8)
	$(PYTHON) -m benchmarks.gpu$(if $(RANKS),.ranks --ranks $(RANKS)) $(CHOSEN) $(if $(QUICK),--quick) $(if $(TUNE),--tune)
endif
ifeq ($(filter-out float8,$(PART))$(RANKS),)
	$(PYTHON) -m benchmarks.gpu.float8 --recipes fp8,current,blocks $(if $(COMMIT),--commit $(COMMIT)) $(if $(QUICK),--quick) $(FLOAT8_RECORD)
endif

gpu-docs:
	$(PYTHON) -m benchmarks.gpu --only-docs
