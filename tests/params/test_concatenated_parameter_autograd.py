"""Parameters joined without a copy, as autograd sees them: the parts alone, each at its time."""

from __future__ import annotations

import contextvars
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser
from te_fuser import ops
from te_fuser.params import concatenated_parameter
from tests.ops.check import normal
from tests.params.test_concatenated_parameter import OUT, WIDTH, Projection
from tests.recorded import recorded
from tests.refused import raises
from tests.threads import in_threads

OWN = {"kernels": "reference"}
EACH = pytest.mark.parametrize("options", [{}, OWN], ids=["recorded", "own nodes"])


@pytest.fixture(autouse=True)
def _recorded() -> Iterator[None]:
    with recorded():
        yield


class Short(Projection):
    """[q, k, v] = LayerNorm(x) [Wq; Wk; Wv]^T + [bq; bk; bv], so little that PyTorch's functions do it best."""

    def __init__(self, together: bool = True, **options: Any) -> None:
        super().__init__(together, **options)
        del self[3]

    def meaning(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.layer_norm(x, (WIDTH,), self[0].weight, self[0].bias)
        return torch.nn.functional.linear(h, torch.cat(self.parts()), torch.cat(self.parts("bias")))


def source(seed: int = 7) -> torch.Tensor:
    return normal(3, WIDTH, seed=seed).float().requires_grad_()


def run(model: Short, x: torch.Tensor, fused: bool = True) -> list[torch.Tensor]:
    """The gradients of x and of all parameters."""
    y = model(x) if fused else model.meaning(x)
    leaves = [t for t in (x, *model.parameters()) if t.requires_grad]
    return list(torch.autograd.grad(y, leaves, normal(3, OUT, seed=5).float()))


def test_a_short_list_is_recorded() -> None:
    model, x = Short(), source()
    assert [s.recorded for s in model.plan(x).segments] == [True]
    assert [s.recorded for s in Short(**OWN).plan(x).segments] == [False]


@EACH
@pytest.mark.parametrize("together", [True, False])
def test_values_and_gradients(options: dict[str, Any], together: bool) -> None:
    model = Short(together, **options)
    for seed in range(3):  # the second call is like the first one, and backward runs through the same nodes
        x = source(seed)
        torch.testing.assert_close(model(x), model.meaning(x))
        torch.testing.assert_close(run(model, x), run(model, x, False))
    model.value_weight.requires_grad_(False)
    torch.testing.assert_close(run(model, x), run(model, x, False))
    model(x).sum().backward()
    assert model.value_weight.grad is None and model.key_weight.grad is not None


@EACH
def test_each_part_has_its_gradient_before_those_of_earlier_layers(options: dict[str, Any]) -> None:
    """As data parallelism needs it, which sends them while backward goes on."""
    first, second, seen = Short(**options), Short(**options), list[str]()
    middle = torch.nn.Linear(OUT, WIDTH)
    model = torch.nn.Sequential(first, middle, second)
    for _ in range(2):
        seen.clear()
        handles = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
            for name, p in model.named_parameters()
        ]
        model(source()).sum().backward()
        for handle in handles:
            handle.remove()
        assert [name.split(".")[0] for name in seen] == ["2"] * 8 + ["1"] * 2 + ["0"] * 8


@EACH
def test_several_calls_in_one_backward(options: dict[str, Any]) -> None:
    model, a, b = Short(**options), source(1), source(2)
    found = torch.autograd.grad((model(a) * model(b)).sum(), [a, b, *model.parts()])
    torch.testing.assert_close(
        found, torch.autograd.grad((model.meaning(a) * model.meaning(b)).sum(), [a, b, *model.parts()])
    )
    y = model(a)
    twice = [torch.autograd.grad(y.sum(), model.parts(), retain_graph=True) for _ in range(2)]
    torch.testing.assert_close(*twice)


@EACH
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_and_hooks(options: dict[str, Any], reentrant: bool) -> None:
    model, x = Short(**options), source()
    model.key_weight.register_hook(lambda g: 2 * g)
    checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    want = torch.autograd.grad(model.meaning(x).sum(), model.parts())
    torch.testing.assert_close([p.grad for p in model.parts()], list(want))  # the hook has been in both


@EACH
def test_what_is_refused(options: dict[str, Any]) -> None:
    model, x = Short(**options), source()
    with pytest.raises(RuntimeError, match="does not differentiate its backward"):
        torch.autograd.grad(model(x).sum(), model.parts(), create_graph=True)
    y = model(x)
    with torch.no_grad():
        for p in model.parts():
            p.add_(1.0)
    raises(RuntimeError, "modified by an inplace operation", lambda: y.sum().backward())


@EACH
def test_backward_in_several_threads(options: dict[str, Any]) -> None:
    model = Short(**options)
    x = source()
    want, contexts = run(model, x), [contextvars.copy_context() for _ in range(3)]
    found = in_threads(*(lambda c=c: c.run(lambda: [run(model, x) for _ in range(20)]) for c in contexts))
    for one in (one for of_thread in found for one in of_thread):
        torch.testing.assert_close(one, want)


@EACH
def test_a_dropped_model_is_freed(options: dict[str, Any]) -> None:
    model = Short(**options)
    model(source()).sum().backward()
    gone = [weakref.ref(t) for t in (model, *model.parts())]
    gc.disable()
    try:
        del model
        assert [ref() for ref in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_on_another_stream_it_is_joined_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes run on the stream that they were made on, which a capture on another one does not stand."""
    stream = [1]
    monkeypatch.setattr(concatenated_parameter, "_on_this_stream", lambda device: ((lambda: stream[0], stream[0]),))
    model, x = Short(), source()
    run(model, x)
    binding = concatenated_parameter.JoinedBinding(model, ("query_weight", "key_weight", "value_weight"))
    whole, node = weakref.ref(binding.taken()), weakref.ref(model.query_weight)
    assert whole() is binding.taken() and node() is not None
    stream[0] = 2
    torch.testing.assert_close(run(model, x), run(model, x, False))
    assert whole() is None and binding.taken() is model.__dict__["_wholes"][binding.name]


def test_presets_with_parameters_apart_run_as_their_list() -> None:
    preset = te_fuser.LayerNormLinear(WIDTH, 3 * WIDTH, parameters_split=("query", "key", "value"), device="cpu")
    listed = te_fuser.Sequential(ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 3 * WIDTH))
    x = source()
    assert [s.name for s in preset.plan(x).steps] == [s.name for s in listed.plan(x).steps]
