"""delay_wgrad_compute: backward gives gradients of inputs, backward_dw those of weights, against models without."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.nn.utils import parametrize

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.run import delayed
from te_fuser.parallel import backward_dw
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from tests.twins import assert_same_gradients, randomize, sequential, tensor

F = 8
Model = Callable[..., torch.nn.Module]


def gpt(**options: Any) -> te_fuser.Sequential:
    core = ops.DotProductAttention(2, F // 2, mask="causal", layout="sequence_first", dropout=0.1)
    products = [ops.Linear(*sizes, **options) for sizes in ((F, 3 * F), (F, F), (F, 32), (32, F))]
    return sequential(
        te_fuser.Residual(ops.LayerNorm(F), products[0], core, products[1], ops.Dropout(0.1)),
        te_fuser.Residual(ops.RMSNorm(F), products[2], ops.GELU(), products[3]),
    )


def tied(**options: Any) -> te_fuser.Sequential:
    """Weights that two branches read, whose gradients are sums of terms."""
    up, down = ops.Linear(F, 32, **options), ops.Linear(32, F, **options)
    return sequential(*(te_fuser.Residual(ops.LayerNorm(F), up, ops.GELU(), down) for _ in range(2)))


def preset(kind: str, *sizes: int, **given: Any) -> Model:
    def made(**options: Any) -> torch.nn.Module:
        plain = {"params_dtype": torch.float64, "kernels": "reference", "device": "cpu"}
        return randomize(getattr(te_fuser, kind)(*sizes, **plain, **given, **options))

    return made


DROPS = {"attention_dropout": 0.1}
MODELS: dict[str, Model] = {
    "gpt": gpt,
    "tied": tied,
    "Linear": preset("Linear", F, F),
    "LayerNormLinear": preset("LayerNormLinear", F, F),
    "LayerNormMLP": preset("LayerNormMLP", F, 32, activation="swiglu"),
    "TransformerLayer": preset("TransformerLayer", F, 32, 2, hidden_dropout=0.1, num_gqa_groups=1, **DROPS),
    "parts": preset("Linear", F, F, parameters_split=("a", "b")),
}


def backward(model: torch.nn.Module, seed: int, run: Any = None) -> torch.Tensor:
    """The gradient of x."""
    x = tensor(6, 2, F, seed=seed)
    torch.manual_seed(seed)
    y = (run or model)(x)
    (y * tensor(*y.shape, grad=False, seed=seed + 9)).sum().backward()
    assert x.grad is not None
    return x.grad


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def products(model: torch.nn.Module) -> set[str]:
    """The names of weights that products multiply with."""
    return {name for name, p in model.named_parameters() if p.dim() == 2}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_micro_batches(name: str, cut: bool) -> None:
    """Two backwards, then what each left, the first one's first; the sums are those of whole backwards, bit for bit."""
    small = mock.patch.multiple(segmenting, SEGMENT_BYTES=1, _SHORT_END=0, WORTH_A_NODE=0)
    with small if cut else mock.patch.object(segmenting, "SEGMENT_BYTES", segmenting.SEGMENT_BYTES):
        model, twin = MODELS[name](delay_wgrad_compute=True), MODELS[name]()
        want = []
        for seed in range(2):
            torch.testing.assert_close(backward(model, seed), backward(twin, seed), rtol=0, atol=0)
            want.append(gradients(twin))
        weights = products(model)
        assert weights and all(p is None for n, p in gradients(model).items() if n in weights)
        assert all(p is not None for n, p in gradients(model).items() if n not in weights)
        for kept in want:
            backward_dw(model)
            assert_same_gradients(*({n: of[n] for n in weights} for of in (gradients(model), kept)))
        assert_same_gradients(gradients(model), want[-1])
        backward_dw(model)  # nothing is left
        assert_same_gradients(gradients(model), want[-1])
        assert not any(delayed._WAITING in p.__dict__ for p in model.parameters())


def test_plans_say_it() -> None:
    plan = gpt(delay_wgrad_compute=True).plan(tensor(6, 2, F))
    (segment,) = plan.segments
    assert len(segment.late) == 4 and [*segment.backward[-4:]] == [*segment.late]
    assert any("weight, weight, weight, weight are left to backward_dw()" in note for note in plan.notes)
    assert not gpt().plan(tensor(6, 2, F)).segments[0].late


def test_parts_of_a_list_are_asked_by_themselves() -> None:
    """One segment has left what two layers ask for, in any order, of either of two micro-batches."""
    made = preset("LayerNormMLP", F, 32)
    model = te_fuser.Sequential(made(delay_wgrad_compute=True), made(delay_wgrad_compute=True), kernels="reference")
    twin = te_fuser.Sequential(made(), made(), kernels="reference")
    for seed in range(2):
        backward(model, seed)
        backward(twin, seed)
        if seed == 0:
            first = gradients(twin)
    for k in (1, 0):
        model[k].backward_dw()
    assert_same_gradients(
        gradients(model), {n: first[n] if n in products(twin) else g for n, g in gradients(twin).items()}
    )
    for k in (0, 1):
        model[k].backward_dw()
    assert_same_gradients(gradients(model), gradients(twin))


def test_one_product_of_several() -> None:
    """Set later, of one op: the others' gradients come with backward."""
    model, twin = gpt(), gpt()
    backward(model, 0)
    model.zero_grad()
    model[1][1].delay_wgrad_compute = True
    backward(model, 1)
    backward(twin, 1)
    assert [n for n, p in model.named_parameters() if p.grad is None] == ["1.1.weight"]
    model.backward_dw()
    assert_same_gradients(gradients(model), gradients(twin))
    model[1][1].delay_wgrad_compute = False
    backward(model, 2)
    backward(twin, 2)
    assert_same_gradients(gradients(model), gradients(twin))


@pytest.mark.parametrize(
    ("name", "run"), [("TransformerLayer", "torch"), ("gpt", "torch, reentrant"), ("gpt", "te_fuser")]
)
def test_checkpointing(name: str, run: str) -> None:
    model, twin = MODELS[name](delay_wgrad_compute=True), MODELS[name]()
    by = {
        "torch": lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False),
        "torch, reentrant": lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True),
        "te_fuser": lambda x: te_fuser.checkpoint(model, x),
    }
    torch.testing.assert_close(backward(model, 0, by[run]), backward(twin, 0))
    assert all(p is None for n, p in gradients(model).items() if n in products(model))
    backward_dw(model)
    assert_same_gradients(gradients(model), gradients(twin))


def test_hooks_see_gradients_and_a_graph_may_be_kept() -> None:
    model, twin, seen = gpt(delay_wgrad_compute=True), gpt(), []
    weight = model[1][1].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for m in (model, twin):
        torch.manual_seed(0)
        y = m(tensor(6, 2, F)).square().sum()
        y.backward(retain_graph=True)
        y.backward()
    assert not seen
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.backward_dw()
        model.backward_dw()
    assert len(seen) == 2 and torch.equal(2 * seen[0], seen[1])
    assert_same_gradients(gradients(model), gradients(twin))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_wait_for_nothing(copied: Callable[[Any], Any]) -> None:
    model, twin = gpt(delay_wgrad_compute=True), gpt()
    backward(model, 0)
    other = copied(model)
    other.zero_grad()
    other.backward_dw()
    assert all(p.grad is None for p in other.parameters())
    backward(other, 0)
    backward(twin, 0)
    for m in (model, other):
        m.backward_dw()
        assert_same_gradients(gradients(m), gradients(twin))


def test_what_asks_for_gradients_of_inputs_alone_leaves_nothing() -> None:
    model, x = gpt(delay_wgrad_compute=True), tensor(6, 2, F)
    torch.autograd.grad(model(x).sum(), x)
    model(x).sum().backward(inputs=[x])
    model.backward_dw()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("made", [gpt, tied])
def test_main_grad(made: Model) -> None:
    """Written over by the first micro-batch, added to by the second: also of weights that are read twice."""
    twin = made()
    model = made(delay_wgrad_compute=True, accumulate_into_main_grad=True)
    second = made(delay_wgrad_compute=True, accumulate_into_main_grad=True)
    names = list(products(model))
    for n in names:
        model.get_parameter(n).main_grad = torch.full_like(model.get_parameter(n), 7.0)
        model.get_parameter(n).overwrite_main_grad = True
    for seed in range(2):
        backward(model, seed)
        backward(twin, seed)
        model.backward_dw()
        for n in names:
            model.get_parameter(n).overwrite_main_grad = False
    for n in names:
        assert model.get_parameter(n).grad is None
        torch.testing.assert_close(model.get_parameter(n).main_grad, twin.get_parameter(n).grad)
    with pytest.raises(RuntimeError, match="has no main_grad"):
        backward(second, 0)
        second.backward_dw()


def test_what_only_measures_leaves_nothing() -> None:
    """verify, tune, and a list that verifies each of its calls."""
    model = tied(delay_wgrad_compute=True)
    te_fuser.verify(model, tensor(6, 2, F, grad=False), dtypes=[torch.float64])
    model.explain(tensor(6, 2, F), measure=True, details=True)
    model.backward_dw()
    assert all(p.grad is None for p in model.parameters())
    twin = tied()
    model.verify = True
    backward(model, 0)
    backward(twin, 0)
    model.backward_dw()
    assert_same_gradients(gradients(model), gradients(twin))


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("recipe", [DelayedScaling(), Float8CurrentScaling()])
def test_a_region_of_fp8(recipe: Recipe, kernels: str) -> None:
    """Tensors that backward has in 8 bits wait as they are, with the scales of then."""
    model, twin = (
        te_fuser.Sequential(
            ops.LayerNorm(32), ops.Linear(32, 64, **o), ops.GELU(), ops.Linear(64, 32, **o), kernels=kernels
        )
        for o in ({"delay_wgrad_compute": True}, {})
    )
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        for seed in range(2):
            with te_fuser.autocast(recipe=recipe):
                y = m(tensor(32, 32, dtype=torch.float32, seed=seed))
            y.square().sum().backward()
    assert model[1].weight.grad is None
    for _ in range(2):
        model.backward_dw()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0, msg=name)


def test_refusals() -> None:
    model = sequential(ops.Linear(F, F, delay_wgrad_compute=True))
    for whole in (model, te_fuser.Sequential(preset("LayerNormMLP", F, 32)(delay_wgrad_compute=True))):
        with pytest.raises(ValueError, match="cuda_graph captures whole backwards"):
            te_fuser.cuda_graph(whole, torch.zeros(2, F))
    with pytest.raises(TypeError, match="Linear takes True or False as delay_wgrad_compute, got 'yes'"):
        ops.Linear(F, F, delay_wgrad_compute="yes")  # type: ignore[arg-type]
    made = preset("Linear", F, F)(delay_wgrad_compute=True)
    with pytest.raises(AttributeError, match="delay_wgrad_compute"):
        made.delay_wgrad_compute = False
    computed = copy.deepcopy(model)
    parametrize.register_parametrization(computed[0], "weight", torch.nn.Tanh())
    with pytest.raises(RuntimeError, match="delay_wgrad_compute takes parameters, and a weight .* was computed"):
        computed(tensor(3, F))


def product(features: int = 6) -> te_fuser.Linear:
    return te_fuser.Linear(features, 4, delay_wgrad_compute=True, params_dtype=torch.float64, device="cpu")


def test_what_a_backward_that_raised_has_left_is_not_used() -> None:
    """A later one has ended, and its gradients come."""
    model = product()
    for seed in range(3):
        broken, x = (tensor(3, 6, seed=seed + k) for k in (7, 0))
        broken.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(broken).sum().backward()
        model.zero_grad()
        y = model(x)
        y.sum().backward()
        model.backward_dw()
        torch.testing.assert_close(model.weight.grad, x.detach().sum(0).expand(4, 6), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("what", ["x", "dy"])
def test_what_is_written_before_is_refused(what: str) -> None:
    model, x = product(), tensor(3, 6, grad=False)
    y = model(x)
    dy = torch.ones_like(y)
    y.backward(dy)
    (x if what == "x" else dy).zero_()
    with pytest.raises(RuntimeError, match=r"backward_dw: a tensor \[3, [64]\] .* was written in place since"):
        model.backward_dw()


def test_what_is_behind_one_that_raises_stays() -> None:
    """Two products apart, of which the first one's weight has a hook that raises once."""
    models = torch.nn.ModuleList([product(), product()])
    x = tensor(3, 6)
    sum(m(x).sum() for m in models).backward()  # type: ignore[union-attr]
    handle = models[0].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        te_fuser.parallel.backward_dw(models)
    handle.remove()
    te_fuser.parallel.backward_dw(models)
    torch.testing.assert_close(models[1].weight.grad, x.detach().sum(0).expand(4, 6), rtol=1e-12, atol=1e-12)


def test_a_parameter_is_saved_without_what_waits_at_it(tmp_path: Path) -> None:
    model = product()
    model(tensor(3, 6)).sum().backward()
    torch.save({"w": model.weight}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)["w"]
    assert torch.equal(loaded, model.weight)
    model.weight = loaded
    x = tensor(3, 6, seed=2)
    model(x).sum().backward()
    model.backward_dw()
    torch.testing.assert_close(model.weight.grad, x.detach().sum(0).expand(4, 6), rtol=1e-12, atol=1e-12)


def test_many_that_wait_are_said_once() -> None:
    delayed._warn_many.cache_clear()
    model = product()
    with pytest.warns(RuntimeWarning, match="64 backwards wait at one weight for backward_dw"):
        for _ in range(64):
            model(tensor(3, 6)).sum().backward()
    for _ in range(64):
        model.backward_dw()
    assert model.weight.grad is not None
    torch.testing.assert_close(
        model.weight.grad, 64 * tensor(3, 6).detach().sum(0).expand(4, 6), rtol=1e-12, atol=1e-12
    )
