"""Ops that read several parameters as one, or one transposed: values, gradients, and when they take no copy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan import segmenting
from te_fuser.params import concatenated_parameter
from te_fuser.params.concatenated_parameter import TransposedBinding
from tests.ops.check import normal
from tests.refused import raises
from tests.twins import assert_same, stored

WIDTH, ROWS = 8, {"query": 8, "key": 3, "value": 5}
OUT = sum(ROWS.values())


class Projection(ops.Together, te_fuser.Sequential):
    """[q, k, v] = x [Wq; Wk; Wv]^T + [bq; bk; bv], then GELU."""

    def __init__(self, together: bool = True, **options: Any) -> None:
        weights, biases = ([f"{name}_{what}" for name in ROWS] for what in ("weight", "bias"))
        super().__init__(
            ops.LayerNorm(WIDTH),
            ops.Bound(ops.MatMul(WIDTH, OUT, device="meta"), self, weight=weights),
            ops.Bound(ops.Bias(OUT, device="meta"), self, bias=tuple(biases)),
            ops.GELU(),
            **options,
        )
        for k, (name, rows) in enumerate(ROWS.items()):
            setattr(self, f"{name}_weight", torch.nn.Parameter(normal(rows, WIDTH, seed=k).float()))
            setattr(self, f"{name}_bias", torch.nn.Parameter(normal(rows, seed=k).float()))
        if together:
            self.keep_together(*weights)
            self.keep_together(*biases)

    def parts(self, what: str = "weight") -> list[torch.nn.Parameter]:
        return [getattr(self, f"{name}_{what}") for name in ROWS]

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.layer_norm(x, (WIDTH,), self[0].weight, self[0].bias)
        h = torch.nn.functional.linear(h, torch.cat(self.parts()), torch.cat(self.parts("bias")))
        return torch.nn.functional.gelu(h, approximate="tanh")

    @property
    def is_together(self) -> bool:
        return concatenated_parameter.lie_together(self.parts()) and concatenated_parameter.lie_together(
            self.parts("bias")
        )


class Turned(te_fuser.Sequential):
    """y = gelu(norm(x) W + b) with W [in, out]."""

    def __init__(self, **options: Any) -> None:
        super().__init__(
            ops.LayerNorm(WIDTH),
            ops.Bound(ops.MatMul(WIDTH, OUT, device="meta"), self, weight=ops.Transposed("weight")),
            ops.Bound(ops.Bias(OUT, device="meta"), self, bias="bias"),
            ops.GELU(),
            **options,
        )
        self.weight = torch.nn.Parameter(normal(WIDTH, OUT).float())
        self.bias = torch.nn.Parameter(normal(OUT).float())

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.layer_norm(x, (WIDTH,), self[0].weight, self[0].bias)
        return torch.nn.functional.gelu(x @ self.weight + self.bias, approximate="tanh")


def assert_as_meant(model: Any, x: torch.Tensor, run: Callable[..., Any] | None = None) -> None:
    y, want = (run or model)(x), model.meaning(x)
    torch.testing.assert_close(y, want)
    assert_same(y, want, [t for t in (x, *model.parameters()) if t.requires_grad], 1e-4)


MODELS: dict[str, Callable[..., Any]] = {
    "together": Projection,
    "apart": lambda **options: Projection(together=False, **options),
    "transposed": Turned,
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"kernels": "reference"}, {"verify": True}])
@pytest.mark.parametrize("shape", [(3, 5), (1,), (0,)])
def test_values_and_gradients(name: str, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    model, x = MODELS[name](**options), normal(*shape, WIDTH).float().requires_grad_()
    for _ in range(2):
        assert_as_meant(model, x)
    assert_as_meant(model, x, model.reference)
    assert_as_meant(model, x, lambda x: checkpoint(model, x, use_reentrant=False))
    assert_as_meant(model.double(), x.detach().double().requires_grad_())
    next(p for name, p in model.named_parameters() if name.endswith("weight")).requires_grad_(False)
    assert_as_meant(model, x.detach().double())
    with torch.no_grad():
        torch.testing.assert_close(model(x.double()), model.meaning(x.double()))


@pytest.mark.parametrize("together", [True, False])
def test_copied_only_where_they_lie_apart(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, copies = Projection(together), normal(3, WIDTH).float(), []
    assert model.is_together is together
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda *args, **kwargs: copies.append(1) or cat(*args, **kwargs))
    model(x).sum().backward()
    assert len(copies) == (0 if together else 3)  # weights and biases, and the weights again in backward
    note = "query_weight, key_weight, value_weight lie apart, so each call copies them"
    assert (note in str(model.explain(x, details=True))) is not together
    assert len(model.plan(x).graph.nodes) == 4


def loaded(model: Projection, assign: bool) -> Projection:
    found = Projection()
    found.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    return found


WAYS: dict[str, Callable[[Projection], Projection]] = {
    "to": lambda m: m.to(torch.bfloat16).to(torch.float32),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "save": stored,
    "load": lambda m: loaded(m, False),
    "assign": lambda m: loaded(m, True),
    "inside": lambda m: copy.deepcopy(torch.nn.Sequential(m)).double().float()[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_they_stay_together(way: str) -> None:
    model, x = Projection(), normal(3, WIDTH).float().requires_grad_()
    names, parameters = list(model.state_dict()), list(model.parameters())
    found = WAYS[way](model)
    assert found.is_together and list(found.state_dict()) == names
    assert_as_meant(found, x)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_in_half_precision_and_under_autocast() -> None:
    model, x = Projection(), normal(3, 5, WIDTH).float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    torch.testing.assert_close(y.float(), model.meaning(x), rtol=0.05, atol=0.05)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    half = model.bfloat16()
    torch.testing.assert_close(half(x.bfloat16()), half.meaning(x.bfloat16()), rtol=0.05, atol=0.05)


def test_what_cannot_be_joined() -> None:
    x = normal(3, WIDTH).float()
    model = Projection()
    model.key_weight = torch.nn.Parameter(torch.zeros(3, WIDTH + 1))
    raises(ValueError, r"are joined along dimension 0, got \[8, 8\], \[3, 9\], \[5, 8\]", model, x)
    model = Projection()
    model.value_bias = torch.nn.Parameter(torch.zeros(5).double())
    raises(TypeError, r"value_bias is torch.float64 on cpu and query_bias torch.float32 on cpu", model, x)
    model = Projection()
    model.key_weight = torch.nn.Parameter(torch.zeros(4, WIDTH))
    raises(ValueError, r"parameter weight has shape \[17, 8\], the op was made for \[16, 8\]", model, x)
    with pytest.raises(AttributeError):
        Projection().keep_together("query_weight", "nothing")
    raises(TypeError, "takes a parameter's name as bias, got a tuple", ops.Bound, ops.Bias(3), model, bias=())


def test_a_state_dict_shares_memory_and_each_part_has_a_storage_of_its_own() -> None:
    """Writers of files take a storage for one tensor's memory; writes into the state dict reach the parameters."""
    owner = ops.Together()
    owner.a, owner.b = (torch.nn.Parameter(torch.randn(n, 3)) for n in (2, 4))
    owner.keep_together("a", "b")
    state = owner.state_dict()
    assert [t.untyped_storage().nbytes() for t in state.values()] == [4 * 6, 4 * 12]
    state["b"].zero_()
    assert (owner.b == 0).all() and not state["b"].requires_grad
    assert owner.state_dict(keep_vars=True)["a"] is owner.a


class Attention(ops.Together):
    """A module whose parts own what one product reads."""

    def __init__(self) -> None:
        super().__init__()
        for k, (name, rows) in enumerate(ROWS.items()):
            part = torch.nn.Linear(WIDTH, rows, bias=False)
            part.weight = torch.nn.Parameter(normal(rows, WIDTH, seed=k))
            setattr(self, name, part)
        self.names = [f"{name}.weight" for name in ROWS]
        self.keep_together(*self.names)

    def ops(self) -> te_fuser.Sequential:
        product = ops.Bound(ops.MatMul(WIDTH, OUT, device="meta"), self, weight=self.names)
        return te_fuser.Sequential(product, ops.GELU(), kernels="reference")

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.get_submodule(name)(x) for name in ROWS]
        return torch.nn.functional.gelu(torch.cat(parts, -1), approximate="tanh")


def test_parameters_of_several_parts() -> None:
    first, x = Attention(), normal(3, WIDTH).requires_grad_()
    for owner in (first, copy.deepcopy(first).float().double()):
        assert concatenated_parameter.lie_together(list(owner.parameters()))
        model = owner.ops()
        assert_same(model(x), owner.meaning(x), [x, *owner.parameters()])
        assert not model.plan(x).notes
    states = torch.nn.ModuleDict({"inside": owner}).state_dict()
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in states.values())
    assert list(states) == [f"inside.{name}" for name in owner.names]


def test_a_part_may_be_another_or_go() -> None:
    owner, x = Attention(), normal(3, WIDTH)
    model = owner.ops()
    model(x)
    owner.key = torch.nn.Linear(WIDTH, 3, bias=False).double()
    torch.testing.assert_close(model(x), owner.meaning(x))
    assert "lie apart" in " ".join(model.plan(x).notes)
    owner.double()
    assert concatenated_parameter.lie_together(list(owner.parameters()))
    del owner.key
    owner.float()
    with pytest.raises(AttributeError):
        model(x)


def test_what_is_joined_is_known_again() -> None:
    """Calls like the last one join nothing anew; parameters that moved, were replaced or frozen are seen."""
    model, x = Projection(kernels="reference"), normal(3, WIDTH).float().requires_grad_()
    (binding,) = [b for b in model._prepared()[0].fuser._lists.plain.bound.bindings if b.name.endswith("value_weight")]
    assert_as_meant(model, x)
    whole = binding.taken()
    assert whole is binding.taken() and model._prepared()[0].fuser._last is not None
    assert binding.shape() == whole.shape
    with torch.no_grad():
        model.key_weight.mul_(2.0)
    assert_as_meant(model, x)
    model.query_weight.data = model.query_weight.data.t()  # square: it lies where it lay, the other way round
    assert_as_meant(model, x)
    model.key_weight.data = normal(3, WIDTH, seed=9).float()
    assert_as_meant(model, x)
    assert binding.taken() is not whole
    model.keep_together(*[f"{name}_weight" for name in ROWS])
    model.key_weight = torch.nn.Parameter(model.key_weight.data)
    assert_as_meant(model, x)
    model.key_weight.requires_grad_(False)
    assert_as_meant(model, x)
    assert model.key_weight.grad is None
    for p in model.parts():
        p.requires_grad_(False)
    y = model(x)
    assert y.requires_grad and not binding.taken().requires_grad
    before = binding.taken().data_ptr()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not twin.__dict__["_wholes"]
        torch.testing.assert_close(twin(x), y)
    model.double()
    assert not model.__dict__["_wholes"] and binding.taken().data_ptr() != before
    with torch.inference_mode():
        model.double()(x.double())
    for p in model.parameters():
        p.requires_grad_(True)
    assert_as_meant(model, x.detach().double().requires_grad_())


@pytest.mark.parametrize("segments", [1, 2])
def test_backward_keeps_no_copy_of_what_lies_apart(segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that fully_shard takes apart after forward are not held by a copy; they are joined again."""
    if segments > 1:
        monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
        monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    model = te_fuser.Sequential(Projection(together=False), Projection(together=False).append(ops.Linear(OUT, WIDTH)))
    model[0].append(ops.Linear(OUT, WIDTH))
    x, held = normal(5, WIDTH).float().requires_grad_(), []

    def note(t: torch.Tensor) -> torch.Tensor:
        held.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = model(x)
    assert len(model.plan(x).segments) >= segments
    parameters = {p.data_ptr() for p in model.parameters()}
    assert all(t.data_ptr() in parameters or t.shape not in ((OUT, WIDTH), (OUT,)) for t in held)
    assert {p.data_ptr() for p in (*model[0].parts(), *model[1].parts())} <= {t.data_ptr() for t in held}
    leaves = [x, *model.parameters()]
    dy = torch.randn_like(y)
    want = torch.autograd.grad(model.reference(x), leaves, dy)
    for keep in (True, False):
        for got, other in zip(torch.autograd.grad(y, leaves, dy, retain_graph=keep), want, strict=True):
            torch.testing.assert_close(got, other)


def test_a_transposed_parameter_is_read_in_place_and_looked_at() -> None:
    model, x = Turned(), normal(5, WIDTH).float()
    binding = TransposedBinding(model, "weight")
    assert binding.taken().data_ptr() == model.weight.data_ptr()
    assert [p.key for p in model.plan(x).graph.parameters].count(binding.key) == 1
    model.plan(x, device="h200")
    assert te_fuser.verify(model, x).passed
    assert "weight=weight.T" in repr(model[1])


def test_what_is_no_matrix_is_not_transposed() -> None:
    model = Turned()
    model.weight = torch.nn.Parameter(torch.zeros(WIDTH))
    raises(ValueError, r"weight.T of Turned is read of a matrix, got \[8\]", model, torch.zeros(3, WIDTH))
    del model.weight
    raises(AttributeError, "reads 'weight' of Turned, which has no parameter", model, torch.zeros(3, WIDTH))
