"""What optional packages have in common: versions, functions that changed, first runs; none is imported unasked."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
import threading
import types

import pytest
import torch

from te_fuser.kernels.packages import optional as optional_packages
from te_fuser.kernels.packages.optional import FirstRuns, version_of, why_changed, why_missing, why_unusable
from tests.kernels.attention.cases import in_threads
from tests.kernels.packages import fake_packages


def test_importing_the_package_imports_none_of_them():
    """Nor torch.compile's compiler, which takes as long to import as torch."""
    unwanted = {"flash_attn", "cutlass", "tvm_ffi", "quack", "cudnn", "torch._dynamo", "torch._inductor", "sympy"}
    code = f"import sys, torch; found = {unwanted} - set(sys.modules); import te_fuser; print(found & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_versions():
    assert version_of("torch") is not None and version_of("no-such-package-anywhere") is None
    assert why_missing("one", "1.2", None) == 'one is not installed: pip install "one>=1.2"'
    assert why_missing("one", "1.10", "1.9") == 'it needs one 1.10, found 1.9: pip install "one>=1.10"'
    assert why_missing("one", "1.9", "1.10") is None


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


def test_a_run_gives_what_the_call_gives(runs):
    for times in (1, 2):
        assert runs.run(0, "form", lambda: times, failed) == times  # noqa: B023
        assert len(runs) == 1
    runs.forget()
    assert len(runs) == 0


def test_errors_are_put_in_words_and_running_out_of_memory_is_not(runs):
    for _ in ("before it ran", "after"):
        with pytest.raises(RuntimeError, match="one failed: no tile") as raised:
            runs.run(0, "form", lambda: fail(ValueError("no tile")), failed)
        assert isinstance(raised.value.__cause__, ValueError)
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            runs.run(0, "form", lambda: fail(torch.OutOfMemoryError("full")), failed)
        runs.run(0, "form", lambda: None, failed)


def test_a_form_that_failed_did_not_run(runs):
    with pytest.raises(RuntimeError, match="no tile"):
        runs.run(0, "form", lambda: fail(ValueError("no tile")), failed)
    assert len(runs) == 0


def test_a_capture_runs_only_what_ran(runs, monkeypatch):
    runs.run(0, "form", lambda: None, failed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert runs.run(0, "form", lambda: 3, failed) == 3
    words = "needs kernels of one that are compiled at their first run, .*: run the model once with inputs like"
    with pytest.raises(RuntimeError, match=words):
        runs.run(0, "other", lambda: pytest.fail("it ran"), failed)
    assert len(runs) == 1


def test_imports_and_first_runs_that_take_long_are_named_and_later_runs_are_not(runs, monkeypatch):
    named = []

    @contextlib.contextmanager
    def progress(what):
        named.append(what)
        yield

    monkeypatch.setattr(optional_packages, "Progress", progress)
    assert why_unusable("one", "1.2", "1.3", lambda: ()) is None
    for _ in range(2):
        runs.run(0, "form", lambda: None, failed)
    assert named == ["importing one 1.3", "one prepares a kernel that it did not run in this process yet"]


def test_what_ran_is_not_remembered_without_end(runs, monkeypatch):
    monkeypatch.setattr(optional_packages, "_FORMS_KEPT", 3)
    for form in range(8):
        assert runs.run(0, form, lambda: 1, failed) == 1
        assert 1 <= len(runs) <= 3


def test_one_thread_at_a_time_compiles_and_all_run_what_is_compiled(runs):
    running, most = [], []

    def watched():
        running.append(threading.get_ident())
        most.append(len(running))
        threading.Event().wait(0.01)
        running.remove(threading.get_ident())

    in_threads([functools.partial(runs.run, 0, form, watched, failed) for form in range(4)])
    assert most == [1, 1, 1, 1] and len(runs) == 4
    together = threading.Barrier(3, timeout=30)  # no thread comes through before all are in their calls
    in_threads([functools.partial(runs.run, 0, form, together.wait, failed) for form in range(3)])
    assert not together.broken
