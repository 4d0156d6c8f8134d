"""Segments as autograd nodes: PyTorch's rules for saving, freeing, recomputing and differentiating are kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan import segmenting
from tests.twins import assert_as_meant, assert_same_gradients, results_and_gradients, sequential, tensor

X = tensor(6, 8)


def block(**options):
    """Something of everything: a norm, products, a residual, draws, a named input and an output in the middle."""
    return sequential(
        ops.LayerNorm(8),
        ops.Linear(8, 16),
        ops.SwiGLU(),
        te_fuser.Residual(ops.Linear(8, 8), ops.GELU(), ops.Output("middle"), ops.Dropout(0.25), ops.Linear(8, 8)),
        ops.Add("extra"),
        ops.RMSNorm(8),
        **options,
    )


EXTRA = {"extra": tensor(6, 8, seed=5)}


def leaves(model, x=X):
    return {"input": x, **EXTRA, **dict(model.named_parameters())}


def wanted(model, x=X):
    return results_and_gradients(model.reference, leaves(model, x), x, (), EXTRA)


def run(model, x=X, seed=0):
    torch.manual_seed(seed)
    return model(x, **EXTRA)


def dy_for(y):
    return tensor(*y.shape, dtype=y.dtype, grad=False, seed=1)


def gradients(model, y, x=X, **options):
    found = leaves(model, x)
    return dict(zip(found, torch.autograd.grad(y, list(found.values()), dy_for(y), **options), strict=True))


# ------------------------------------------------------------------------------------ when backward runs


def test_backward_again_where_the_graph_is_kept():
    model = block()
    _, want = wanted(model)
    y = run(model)
    for keep in (True, True, False):
        assert_same_gradients(gradients(model, y, retain_graph=keep), want)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(model, y)


def test_several_forwards_before_one_backward():
    model = block()
    inputs = [tensor(6, 8, seed=k) for k in range(3)]
    total = sum((run(model, x, seed=k) * (k + 1)).sum() for k, x in enumerate(inputs))
    every = [*inputs, *model.parameters()]
    got = torch.autograd.grad(total, every)
    torch_total = 0.0
    for k, x in enumerate(inputs):
        torch.manual_seed(k)
        torch_total = torch_total + (model.reference(x, **EXTRA) * (k + 1)).sum()
    torch.testing.assert_close(got, torch.autograd.grad(torch_total, every), rtol=1e-11, atol=1e-11)


def test_gradients_add_up_in_grad():
    model = block()
    _, want = wanted(model)
    for times in (1.0, 2.0):
        y = run(model)
        y.backward(dy_for(y))
        got = {name: p.grad for name, p in model.named_parameters()}
        assert_same_gradients(got, {name: times * want[name] for name in got}, 1e-10)
    X.grad = EXTRA["extra"].grad = None


def test_some_of_the_gradients():
    model = block()
    _, want = wanted(model)
    for names in (["input"], ["1.weight", "5.weight"], ["extra"]):
        y = run(model)
        got = torch.autograd.grad(y, [leaves(model)[n] for n in names], dy_for(y))
        assert_same_gradients(dict(zip(names, got, strict=True)), {n: want[n] for n in names})


def test_unused_inputs():
    model, stranger = block(), tensor(3)
    y = run(model)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(y.sum(), [X, stranger], retain_graph=True)
    dx, none = torch.autograd.grad(y.sum(), [X, stranger], allow_unused=True)
    assert none is None and dx.shape == X.shape


class Nothing(torch.autograd.Function):
    """Takes a value and gives its maker no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def test_no_gradient_at_all_arrives():
    model = block()
    grads = torch.autograd.grad(Nothing.apply(run(model)).sum(), [X, *model.parameters()], allow_unused=True)
    assert all(g is None for g in grads)


@pytest.mark.parametrize("segment_bytes", [1, segmenting.SEGMENT_BYTES])
def test_an_output_whose_gradient_is_missing(segment_bytes, monkeypatch):
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = block()
    every = leaves(model)
    for chosen in (0, 1):
        torch.manual_seed(0)
        got = torch.autograd.grad(
            model(X, outputs=("middle",), **EXTRA)[chosen].square().sum(), list(every.values()), allow_unused=True
        )
        torch.manual_seed(0)
        want = torch.autograd.grad(
            model.reference(X, outputs=("middle",), **EXTRA)[chosen].square().sum(),
            list(every.values()),
            allow_unused=True,
        )
        for name, g, w in zip(every, got, want, strict=True):
            zero = torch.zeros_like(every[name])  # a whole segment gives zeros where eager gives none
            torch.testing.assert_close(
                zero if g is None else g, zero if w is None else w, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_an_output_before_any_parameter_takes_no_gradient():
    model = sequential(ops.Output("raw"), ops.GELU(), ops.Output("act"), ops.Linear(8, 8))
    y, raw, act = model(X.detach(), outputs=("raw", "act"))
    assert [t.requires_grad for t in (y, raw, act)] == [True, False, False]
    y.square().sum().backward()
    assert_as_meant(model, X.detach(), ("raw", "act"))
    assert_as_meant(model, X, ("raw", "act"))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f)(tensor(3, 6, 8)),
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        lambda f: torch.func.jacrev(f)(X),
    ],
)
@pytest.mark.parametrize("make", [lambda: sequential(ops.Linear(8, 8), ops.GELU()), ops.GELU])
def test_transforms_are_refused_and_the_reference_takes_them(make, transform):
    model = make()
    model(X)  # a plan that exists is no way around it
    with pytest.raises(TypeError, match=r"does not run inside torch\.func transforms or vmap; .* model\.reference"):
        transform(model)
    if isinstance(model, te_fuser.Sequential):
        transform(model.reference)


# ------------------------------------------------------------------------------------ strides and sizes

GRADIENTS = {
    "stride_0": lambda y: torch.ones((), dtype=y.dtype).expand(y.shape),
    "row_stride_0": lambda y: tensor(1, y.shape[-1], grad=False).expand(y.shape),
    "transposed": lambda y: tensor(y.shape[-1], y.shape[0], grad=False).t(),
    "every_second": lambda y: tensor(y.shape[0], 2 * y.shape[-1], grad=False)[:, ::2],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_every_stride(name):
    model = block()
    dy = GRADIENTS[name](run(model))
    got = torch.autograd.grad(run(model), list(leaves(model).values()), dy)
    torch.manual_seed(0)
    want = torch.autograd.grad(model.reference(X, **EXTRA), list(leaves(model).values()), dy)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


INPUTS = {
    "transposed": lambda: tensor(8, 6, grad=False).t(),
    "expanded": lambda: tensor(1, 8, grad=False).expand(6, 8),
    "scalar_expanded": lambda: tensor(1, 1, grad=False).expand(6, 8),
    "every_second": lambda: tensor(6, 16, grad=False)[:, ::2],
    "permuted": lambda: tensor(2, 8, 3, grad=False).permute(2, 0, 1),
    "offset": lambda: tensor(7, 8, grad=False)[1:],
    "no_rows": lambda: tensor(0, 8, grad=False),
    "no_samples": lambda: tensor(2, 0, 8, grad=False),
    "vector": lambda: tensor(8, grad=False),
    "many_dimensions": lambda: tensor(1, 2, 1, 3, 8, grad=False),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_every_stride_and_rank(name):
    model = block()
    x = INPUTS[name]().requires_grad_()
    before = x.detach().clone()
    assert_as_meant(model, x, ("middle",), extra=INPUTS[name]().requires_grad_())
    assert torch.equal(x, before)


# ------------------------------------------------------------------------------------ what is kept


def test_hooks_on_saved_tensors_see_everything():
    """What they hand back is what backward computes with, and nothing else survives the forward pass."""
    model = block()
    _, want = wanted(model)
    packed: list[torch.Tensor] = []
    made = []

    def pack(t):
        packed.append(t.detach().clone())
        made.append(weakref.ref(t)) if not isinstance(t, nn.Parameter) and t is not X and t is not EXTRA[
            "extra"
        ] else None
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: packed[k]):
        y = run(model)
    gc.collect()
    assert len(packed) == len(model.plan(X, **EXTRA).kept)
    assert made and not any(ref() is not None for ref in made)
    assert_same_gradients(gradients(model, y, retain_graph=True), want)
    for t in packed:
        if t.is_floating_point():
            t.zero_()
    assert gradients(model, y)["input"].abs().max() == 0.0


def test_kept_tensors_are_free_after_backward():
    made = []

    def pack(t):
        made.append(weakref.ref(t))
        return t

    model = block()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run(model)
    alive = [t for t in made if t() is not None]
    assert len(alive) > 5
    gradients(model, y)
    gc.collect()
    left = [t() for t in made if t() is not None]
    assert all(any(t is leaf for leaf in leaves(model).values()) for t in left)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_draws_the_same_masks(reentrant):
    model = block()
    _, want = wanted(model)
    torch.manual_seed(0)
    y = torch.utils.checkpoint.checkpoint(lambda x: model(x, **EXTRA), X, use_reentrant=reentrant)
    torch.manual_seed(123)  # whatever is drawn in between
    if not reentrant:
        assert_same_gradients(gradients(model, y), want)
        return
    y.backward(dy_for(y))
    got = {name: leaf.grad for name, leaf in leaves(model).items()}
    assert_same_gradients(got, want)
    X.grad = EXTRA["extra"].grad = None


def test_checkpointing_of_a_part():
    class Recomputed(te_fuser.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    def make(kind):
        return sequential(
            ops.Linear(8, 8), kind(ops.GELU(), ops.Dropout(0.5), ops.Linear(8, 8), kernels="reference"), ops.ReLU()
        )

    plain, model = make(te_fuser.Sequential), make(Recomputed)
    model[1][1].p = plain[1][1].p = 0.0
    for one, other in zip(
        *(results_and_gradients(m, dict(m.named_parameters()), X) for m in (plain, model)), strict=True
    ):
        torch.testing.assert_close(one, other)
    model[1][1].p = 0.5
    y = model(X)
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    X.grad = None


# ------------------------------------------------------------------------------------ what changes in between


def test_an_optimizer_step_before_backward_is_noticed():
    model = block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y = run(model)
    y.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    X.grad = EXTRA["extra"].grad = None


def test_a_changed_input_is_noticed():
    model, x = block(), tensor(6, 8, grad=False)
    y = run(model, x)
    x.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
