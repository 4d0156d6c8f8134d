"""Providers by packages, which compute on the CPU here: FlashAttention-4, and cuDNN's front end for backward."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest
import torch

from te_fuser.kernels.attention import AttentionProblem
from te_fuser.kernels.attention.cudnn import _graph
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.base import Spec
from tests.kernels.attention import cases
from tests.kernels.packages import fake_cudnn, fake_flash_attn
from tests.kernels.played import Played
from tests.threads import in_threads

FRONT = cases.BY_NAME["cuda_cudnn_frontend"]


@pytest.fixture
def front_end(monkeypatch):
    """A front end in place, and PyTorch's forward played."""
    package = fake_cudnn.in_place(monkeypatch)
    monkeypatch.setattr(FRONT, "_forward", Played(FRONT, 0))
    yield package
    fake_cudnn.forget()


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("packing", cases.PACKINGS)
def test_front_end_stores_gradients_where_they_lie_packed(layout, packing, front_end):
    assert list(cases.each_packed(FRONT, layout, packing))


def test_front_end_takes_inputs_of_other_strides(front_end):
    cases.assert_takes_any_strides(FRONT)
    assert len(front_end.graphs) == 1  # they are copied, and need no graph of their own


def front_problem(**changes):
    return cases.problem(backward_on=0, **changes)


def test_on_a_gpu_at_hand_cudnn_is_asked_while_planning_and_loads_at_the_first_run(front_end):
    assert FRONT.reason_not(front_problem()) is None
    assert [graph.done for graph in front_end.graphs] == [list(fake_cudnn.Graph.STEPS[:-1])]
    assert FRONT.reason_not(front_problem()) is None and len(front_end.graphs) == 1
    for k, changes in enumerate(({"positions": 256}, {"samples": 3}, {"dropout": 0.1}, {"dtype": torch.float16})):
        assert FRONT.reason_not(front_problem(**changes)) is None and len(front_end.graphs) == k + 2
    assert len(front_end.handles) == 1


def test_without_a_backward_or_rows_nothing_is_built(front_end):
    assert FRONT.reason_not(cases.problem()) is None
    assert FRONT.reason_not(front_problem(samples=0)) is None and FRONT.reason_not(front_problem(positions=0)) is None
    assert front_end.graphs == []
    op = DotProductAttention(4, 8, mask="none", layout="sequence_first")
    x = Spec((9, 3, 96), torch.bfloat16, torch.device("cuda", 3))
    assert AttentionProblem.of(op.settings(), x, (9, 0), needs_grad=True).backward_on is None


def test_backward_takes_the_graph_that_planning_built(front_end):
    op, x, dy = cases.make()
    y, saved = FRONT.forward(op.settings(), {"input": x})
    for _ in range(2):
        FRONT.backward(op.settings(), {"input": x, "output": y, **saved}, dy)["input"]
    assert len(front_end.graphs) == 1


@pytest.mark.parametrize(
    "error", [fake_cudnn.GraphNotSupported("no engine"), RuntimeError("no engine"), TypeError("no engine")]
)
def test_what_cudnn_refuses_is_a_reason(error, front_end):
    front_end.refuses = error
    reason = f"cuDNN has no backward for it: {type(error).__name__}: no engine"
    assert FRONT.reason_not(front_problem()) == reason
    assert FRONT.reason_not(front_problem()) is not None and len(front_end.graphs) == 1
    op, x, dy = cases.make()
    with pytest.raises(RuntimeError, match=r"no engine; te_fuser\.fusions\.disabled\('attention_cuda_cudnn_frontend'"):
        cases.by_provider(FRONT, op, x, dy)


def test_another_cudnn_than_pytorchs_is_a_reason(front_end):
    front_end.version = 92000
    assert "has loaded cuDNN 92000, PyTorch 91900" in FRONT.reason_not(front_problem())
    assert FRONT.reason_not(cases.problem()) is None


@pytest.mark.parametrize("where", ["fails", "does_not_load"])
def test_what_fails_in_a_run_of_the_front_end_is_raised_in_words(where, front_end):
    setattr(front_end, where, RuntimeError("misaligned"))
    op, x, dy = cases.make()
    with pytest.raises(RuntimeError, match=r"backward of attention failed for AttentionBackward\(q=.*: misaligned"):
        cases.by_provider(FRONT, op, x, dy)


def test_a_capture_without_the_graph_is_refused(front_end, monkeypatch):
    op, x, dy = cases.make()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for ask in (lambda: cases.by_provider(FRONT, op, x, dy), lambda: FRONT.reason_not(front_problem())):
        with pytest.raises(RuntimeError, match=r"graph of cuDNN .* is not built yet.*run the model once"):
            ask()
    assert front_end.graphs == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert FRONT.reason_not(front_problem()) is None
    settings, (samples, positions) = op.settings(), op.packed.lengths(x.shape)
    assert isinstance(_graph(settings, samples, positions, x.dtype, x.device.index), cudnn_frontend.BackwardGraph)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the model once"):  # it is planned, and not loaded
        cases.by_provider(FRONT, op, x, dy)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    want = cases.by_provider(FRONT, op, x, dy)[1]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch.equal(cases.by_provider(FRONT, op, x, dy)[1], want)


def test_dropout_takes_what_forward_drew(front_end):
    op, x, dy = cases.make(dropout=0.25)
    cases.by_provider(FRONT, op, x, dy)
    (graph,) = front_end.graphs
    assert graph.dropout[0] == 0.25 and front_end.last["seed"] == 7 and front_end.last["offset"] == 9
    cases.by_provider(FRONT, op.eval(), x, dy)
    assert front_end.graphs[1].dropout is None and "seed" not in front_end.last


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_graph_runs_on_addresses_or_else_on_tensors(dropout, front_end):
    for layout, packing in itertools.product(cases.LAYOUTS, cases.PACKINGS):
        op, x, dy = cases.make(mask="causal", dropout=dropout, layout=layout, packing=packing)
        found = []
        for front_end.takes_addresses in (True, False):
            fake_cudnn.forget()
            before = front_end.by_addresses
            found.append(cases.by_provider(FRONT, op, x, dy)[1])
            assert front_end.by_addresses == before + front_end.takes_addresses
        assert torch.equal(*found)


def test_threads_run_one_after_the_other(front_end):
    """A handle is not for two threads at once."""
    op, x, dy = cases.make()
    want, running = cases.by_provider(FRONT, op, x, dy)[1], []
    front_end.takes_addresses = False
    fake_cudnn.forget()
    cases.by_provider(FRONT, op, x, dy)
    execute = front_end.graphs[1].execute

    def watched(*args, **kwargs):
        running.append(threading.get_ident())
        assert len(set(running)) == 1
        threading.Event().wait(0.01)
        execute(*args, **kwargs)
        running.clear()

    front_end.graphs[1].execute = watched
    results = in_threads(*[lambda: cases.by_provider(FRONT, op, x, dy)[1]] * 4)
    assert all(torch.equal(result, want) for result in results)


_AT_EXIT = """
import sys
from te_fuser.kernels.attention import cudnn as attention_cudnn_frontend
from te_fuser.kernels.packages import cudnn_frontend
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
import torch

class Graph:
    def __del__(self):
        print("too late" if sys.is_finalizing() else "in time")

cudnn_frontend.graph_for = lambda problem: Graph()
op = DotProductAttention(2, 8, mask="none", layout="sequence_first")
attention_cudnn_frontend._graph(op.settings(), 1, 4, torch.bfloat16, 0)
"""


def test_no_graph_outlives_the_interpreter() -> None:
    """The front end's bindings print a line to the terminal for each object that does."""
    ended = subprocess.run([sys.executable, "-c", _AT_EXIT], capture_output=True, text=True, check=True)
    assert ended.stdout == "in time\n"


FOUR = cases.BY_NAME["cuda_flash_attn_4"]


@pytest.fixture
def package(monkeypatch):
    """A package in place."""
    yield fake_flash_attn.in_place(monkeypatch)
    fake_flash_attn.forget()


def wide(**changes):
    """A problem on an H200, of heads of 128 features."""
    return cases.problem(**{"head_dim": 128, **changes})


@pytest.mark.parametrize("layout", cases.LAYOUTS)
@pytest.mark.parametrize("packing", cases.PACKINGS)
def test_heads_are_read_and_stored_where_they_lie_packed(layout, packing, package):
    for _, x, dy, y, dx in cases.each_packed(FOUR, layout, packing):
        assert y.is_contiguous() and y.untyped_storage().nbytes() == y.nbytes and not y._is_view()
        (_, ahead), (_, back) = package.calls[-2:]
        inside = {"q": x, "k": x, "v": x, "out": y, "dq": dx, "dk": dx, "dv": dx, "dout": dy}
        for name, tensor in (ahead | back).items():
            assert tensor.untyped_storage().data_ptr() == inside[name].untyped_storage().data_ptr(), name
        for name in "qkv":
            assert back[f"d{name}"].stride() == back[name].stride()


def test_the_scale_and_the_mask_are_passed(package):
    for mask, scale in itertools.product(("none", "causal"), (None, 0.7)):
        op, x, dy = cases.make(mask=mask, scale=scale)
        cases.assert_matches(FOUR, op, x, dy)


def test_inputs_of_other_strides(package):
    cases.assert_takes_any_strides(FOUR)


@pytest.fixture
def at_hand(package, monkeypatch):
    """A machine with a GPU, on which the package is imported."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return package


def test_on_a_machine_with_a_gpu_it_is_imported_while_planning(at_hand):
    assert FOUR.reason_not(wide()) is None and FOUR.reason_not(wide(dropout=0.1)) is not None
    assert at_hand.calls == []


def test_functions_that_changed_are_a_reason(at_hand, monkeypatch):
    def changed(q, k, v, softmax_scale, causal, lse):
        raise AssertionError

    monkeypatch.setattr(at_hand, "_flash_attn_fwd", changed, raising=False)
    monkeypatch.delattr(at_hand, "_flash_attn_bwd")
    assert FOUR.reason_not(wide()) == (
        "flash-attn-4 4.0.0b36 is not as it was in 4.0.0b36: "
        "_flash_attn_fwd takes no out, return_lse, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, softcap, "
        "window_size_left, window_size_right, learnable_sink; it has no _flash_attn_bwd; "
        "it has no _flash_attn_fwd.compile_cache; it has no _flash_attn_bwd.compile_cache"
    )


def test_later_calls_launch_what_the_first_did_without_the_package(package):
    """New memory each time, with zeros where the package wants them."""
    for mask, kv_heads, positions in itertools.product(("none", "causal"), (4, 1), (7, 9)):
        op, x, dy = cases.make(mask=mask, kv_heads=kv_heads, positions=positions)
        cases.by_provider(FOUR, op, x, dy)
        entered, others = package.entered, (t.flip(0).contiguous() for t in (x, dy))
        cases.assert_matches(FOUR, op, *others)
        cases.assert_matches(FOUR, op, x, dy)
        assert package.entered == entered
    assert len(flash_attn_4.runs) == 16


def test_a_call_in_which_pytorch_computes_something_goes_by_the_package(package):
    package.copies = True
    op, x, dy = cases.make(mask="causal")
    for k in range(3):
        entered = package.entered
        cases.assert_matches(FOUR, op, x, dy + k)
        assert k == 0 or package.entered == entered + 1


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_fails_in_a_run_is_raised_in_words(direction, package):
    op, x, dy = cases.make(mask="causal")
    with torch.no_grad():
        y, saved = FOUR.forward(op.settings(), {"input": x})
        runs = {
            "forward": lambda: FOUR.forward(op.settings(), {"input": x.flip(0)}),
            "backward": lambda: FOUR.backward(op.settings(), {"input": x, "output": y, **saved}, dy)["input"],
        }
        package.fails = AssertionError("inputs must be on CUDA device")
        words = rf"flash-attn-4's {direction} of attention failed for queries \[.*causal=True: AssertionError: inputs"
        with pytest.raises(RuntimeError, match=words + r".*disabled\('attention_cuda_flash_attn_4'\) plans without it"):
            runs[direction]()
        package.fails = torch.OutOfMemoryError("full")
        with pytest.raises(torch.OutOfMemoryError, match="full"):
            runs[direction]()
