"""Lists of several segments: a node of autograd for each, with what all share, and where they end."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan import segmenting
from tests.fuser.run.test_segment import EXTRA, X, gradients, wanted
from tests.twins import assert_as_meant, assert_same_gradients, sequential, tensor


def many_layers(**options):
    shared = ops.Linear(8, 8)
    return sequential(
        ops.Fork("far"),
        ops.Linear(8, 8),
        ops.GELU(),
        shared,
        te_fuser.Residual(ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Output("middle"), ops.Linear(8, 8)),
        ops.Dropout(0.25),
        ops.Add("extra"),
        shared,
        ops.AdaptiveLayerNorm(8, scale="extra", shift="extra", per="row"),
        ops.Linear(8, 8, bias=False),
        ops.Add("far"),
        shared,
        **options,
    )


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("segment_bytes", [1, 1500, 3000])
def test_several_segments(segment_bytes, memory, monkeypatch):
    whole = many_layers(memory=memory)
    assert len(whole.plan(X, **EXTRA).segments) == 1
    want = assert_as_meant(whole, X, ("middle",), **EXTRA)
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = many_layers(memory=memory)
    plan = model.plan(X, **EXTRA)
    assert len(plan.segments) >= (4 if segment_bytes == 1 else 2)
    assert plan.segments[0].start == 0 and plan.segments[-1].stop == len(plan.graph.nodes)
    torch.testing.assert_close(assert_as_meant(model, X, ("middle",), **EXTRA), want)
    assert_as_meant(model, X.detach(), **EXTRA)


def nodes_of(y):
    """The autograd nodes of this package below a result."""
    found, stack = set(), [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.add(node)
            stack += [n for n, _ in node.next_functions]
    return [n for n in found if "SegmentFunction" in n.name()]


def test_each_segment_is_one_autograd_node(monkeypatch):
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = many_layers()
    y = model(X, **EXTRA)
    assert len(nodes_of(y)) == len(model.plan(X, **EXTRA).segments) > 3
    with torch.no_grad():
        assert len(model.plan(X, **EXTRA).segments) == 1
    monkeypatch.undo()
    whole = many_layers()
    assert len(nodes_of(whole(X, **EXTRA))) == 1


def test_a_short_end_is_part_of_the_segment_before(monkeypatch):
    """A norm behind the last product: a node of its own would add up its gradients in a launch of its own."""
    parts = [ops.Linear(8, 32), ops.GELU(), ops.Linear(32, 8, bias=False), ops.RMSNorm(8)]
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 8 * 8 * 32)  # a weight in float64
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = sequential(*parts)
    plan = model.plan(X)
    assert [len(plan.graph.nodes), *(s.start for s in plan.segments)] == [5, 0, 3]
    assert_as_meant(model, X)


@pytest.mark.parametrize(("tokens", "segments"), [(256, 1), (65_536, 2)])
def test_what_takes_little_time_is_no_segment_of_its_own(tokens: int, segments: int) -> None:
    """Its autograd node would take the host longer than what it computes is worth."""
    with torch.device("meta"):
        layers = [ops.Linear(4096, 4096, bias=False) for _ in range(2)]
        x = torch.empty(tokens, 4096, dtype=torch.bfloat16, requires_grad=True)
    model = te_fuser.Sequential(*layers).to(torch.bfloat16)
    assert len(model.plan(x, device="h200").segments) == segments


def test_segments_give_their_gradients_one_by_one(monkeypatch):
    """So that DDP can send the last layers' gradients while the first layers still compute theirs."""
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = sequential(*(op for _ in range(4) for op in (ops.Linear(8, 8), ops.GELU())))
    order = []
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: order.append(name))
    model(X).sum().backward()
    X.grad = None
    assert [name.split(".")[0] for name in order if name.endswith("weight")] == ["6", "4", "2", "0"]


def test_segments_with_shared_weights_under_autocast(monkeypatch):
    """Each segment casts the parameters that it reads."""
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    shared = ops.Linear(8, 8)
    model = sequential(shared, ops.GELU(), ops.Linear(8, 8), ops.GELU(), shared, dtype=torch.float32)
    x = tensor(6, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(model.plan(x).segments) == 2
        y = model(x)
    grads = torch.autograd.grad(y.float().sum(), [x, *model.parameters()])
    double = sequential(*model).double()
    want = torch.autograd.grad(double(x.double()).sum(), [*double.parameters()])
    for g, w in zip(grads[1:], want, strict=True):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g.double(), w, rtol=0.05, atol=0.05 * w.abs().max().item())


def test_checkpointing_of_several_segments(monkeypatch):
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = many_layers()
    _, want = wanted(model)
    torch.manual_seed(0)
    y = torch.utils.checkpoint.checkpoint(lambda x: model(x, **EXTRA), X, use_reentrant=False)
    assert_same_gradients(gradients(model, y, retain_graph=True), want)
    assert_same_gradients(gradients(model, y), want)
