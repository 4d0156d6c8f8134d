# Thin wrappers for those who type make; ./dev does the work and takes arguments.
.PHONY: train test lint

train:
	./dev train

test:
	./dev test

lint:
	./dev lint
