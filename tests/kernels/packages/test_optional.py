"""Common parts of optional packages: versions, functions that changed, first runs; none is imported unasked."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import types

import pytest
import torch

from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack
from te_fuser.kernels.packages import optional as optional_packages
from te_fuser.kernels.packages.optional import FirstRuns, Package, version_of, why_changed
from tests.kernels.packages import fake_cudnn, fake_flash_attn, fake_packages, fake_quack
from tests.threads import in_threads


def test_importing_the_package_imports_none_of_them():
    """Nor torch.compile's compiler, which takes as long to import as torch; nor does a default device get a context."""
    unwanted = {"flash_attn", "cutlass", "tvm_ffi", "quack", "cudnn", "torch._dynamo", "torch._inductor", "sympy"}
    code = (
        f"import sys, torch; found = {unwanted} - set(sys.modules); torch.set_default_device('cuda'); import te_fuser; "
    )
    code += "print(found & set(sys.modules), torch.cuda.is_initialized())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set() False"


def made(oldest, version):
    """A package of which that version is installed."""
    package = Package("one", oldest)
    package.version = lambda: version
    return package


def test_versions():
    assert version_of("torch") is not None and version_of("no-such-package-anywhere") is None
    assert made("1.2", None).missing() == 'one is not installed: pip install "one>=1.2"'
    assert made("1.10", "1.9").missing() == 'it needs one 1.10, found 1.9: pip install "one>=1.10"'
    assert made("1.9", "1.10").missing() is None


# Package -> te_fuser's module about it, what stands for it on a CPU, and what asks whether it can be called.
INSTALLED = {
    "quack-kernels": (quack, fake_quack, quack.unusable),
    "flash-attn-4": (flash_attn_4, fake_flash_attn, flash_attn_4.unusable),
    "nvidia-cudnn-frontend": (cudnn_frontend, fake_cudnn, lambda: cudnn_frontend.unusable(91900)),
}


@pytest.mark.parametrize("error", [ImportError("no libcudart"), RuntimeError("no driver"), KeyError("CUDA_HOME")])
@pytest.mark.parametrize("name", INSTALLED)
def test_what_an_import_raises_is_a_reason_and_is_tried_once(name, error, monkeypatch):
    (module, fake, unusable), tried = INSTALLED[name], []
    fake.in_place(monkeypatch)

    def broken(name):
        tried.append(name)
        raise error

    monkeypatch.setattr(module.importlib, "import_module", broken)
    for _ in range(2):
        assert unusable() == f"{name} does not load: {type(error).__name__}: {error}"
    assert len(tried) == 1
    fake.forget()


def test_functions_that_changed():
    def call(a, b, *, c=None):
        raise AssertionError

    class Made:
        def __init__(self, size):
            raise AssertionError

    package = types.SimpleNamespace(call=call, Made=Made)
    assert why_changed(package, "call", ("a", "c")) is why_changed(package, "Made", ("size",)) is None
    assert why_changed(package, "call", ("d", "a", "e")) == "call takes no d, e"
    assert why_changed(package, "Made", ("sizes",)) == "Made takes no sizes"
    assert why_changed(package, "other", ("a",)) == "it has no other"
    assert why_changed(package, "Made.call") == "it has no Made.call" and why_changed(package, "Made.__name__") is None


# ---- first runs -------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch):
    """Of a package, on a CPU in place of a GPU."""
    fake_packages.on_the_cpu(monkeypatch)
    return FirstRuns("one")


def failed(error):
    return RuntimeError(f"one failed: {error}")


def fail(error):
    raise error


def run(runs, call, form="form", *given):
    """A call that nothing has to be prepared for."""
    return runs.run(0, form, lambda: call, given, failed)


def test_a_form_is_prepared_once_and_called_with_the_tensors_of_each_call(runs):
    prepared = []

    def prepare():
        prepared.append(1)
        return lambda one, other: one - other

    for given in ((3, 1), (5, 1)):
        assert runs.run(0, "form", prepare, given, failed) == given[0] - 1
        assert len(runs) == len(prepared) == 1
    runs.forget()
    assert len(runs) == 0
    assert runs.run(0, "form", prepare, (2, 2), failed) == 0 and len(prepared) == 2


def test_errors_are_put_in_words_and_running_out_of_memory_is_not(runs):
    for words in ("before it ran", "after"):
        with pytest.raises(RuntimeError, match="one failed: no tile") as raised:
            run(runs, lambda: fail(ValueError("no tile")), words)
        assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            run(runs, lambda: fail(torch.OutOfMemoryError("full")), words)


def test_a_form_that_failed_did_not_run(runs):
    for prepare in (lambda: fail(ValueError("no tile")), lambda: lambda: fail(ValueError("no tile"))):
        with pytest.raises(RuntimeError, match="no tile"):
            runs.run(0, "form", prepare, (), failed)
        assert len(runs) == 0


def test_a_capture_runs_only_what_ran(runs, monkeypatch):
    run(runs, lambda: 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(runs, lambda: pytest.fail("it was prepared again")) == 3
    words = "needs kernels of one that are compiled at their first run, .*: run the model once with inputs like"
    with pytest.raises(RuntimeError, match=words):
        runs.run(0, "other", lambda: pytest.fail("it was prepared"), (), failed)
    assert len(runs) == 1


def test_imports_and_first_runs_that_take_long_are_named_and_later_runs_are_not(runs, monkeypatch):
    named = []

    @contextlib.contextmanager
    def progress(what):
        named.append(what)
        yield

    monkeypatch.setattr(optional_packages, "Progress", progress)
    assert made("1.2", "1.3").unusable(lambda: ()) is None
    for _ in range(2):
        run(runs, lambda: None)
    assert named == ["importing one 1.3", "one prepares a kernel that it did not run in this process yet"]


def test_what_ran_is_not_remembered_without_end(runs, monkeypatch):
    monkeypatch.setattr(optional_packages, "_FORMS_KEPT", 3)
    for form in range(8):
        assert run(runs, lambda: 1, form) == 1
        assert 1 <= len(runs) <= 3


def test_one_thread_at_a_time_prepares_and_all_run_what_is_prepared(runs):
    running, most = [], []
    together = threading.Barrier(3, timeout=30)  # no thread comes through before all are in their calls

    def watched():
        running.append(threading.get_ident())
        most.append(len(running))
        threading.Event().wait(0.01)
        running.remove(threading.get_ident())
        return lambda meet: together.wait() if meet else None

    in_threads(*(functools.partial(runs.run, 0, form, watched, (False,), failed) for form in (0, 1, 2, 3, 3)))
    assert most == [1, 1, 1, 1] and len(runs) == 4
    in_threads(*(functools.partial(runs.run, 0, form, watched, (True,), failed) for form in range(3)))
    assert not together.broken and len(most) == 4
