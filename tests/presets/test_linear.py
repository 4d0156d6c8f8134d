"""te_fuser.Linear: each argument, against plain PyTorch in float64 and against its list."""

from __future__ import annotations

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.presets.cases import assert_same, bare_list, forward_hook, leaves_of, linear
from tests.twins import randomize, tensor

IN, OUT = 7, 12
SPLIT = ("query_", "key", "value")


def made(*args: Any, **keywords: Any) -> Any:
    sizes = args or (IN, OUT)
    return randomize(te_fuser.Linear(*sizes, **{"device": "cpu", "params_dtype": torch.float64, **keywords}))


def test_values_and_gradients() -> None:
    layer, x = made(), tensor(3, 5, IN)
    assert_same(layer(x), linear(x, layer.weight, layer.bias), leaves_of(layer, x))
    assert list(layer.state_dict()) == ["weight", "bias"]
    layer = made(IN, OUT, False)
    assert_same(layer(x), linear(x, layer.weight), leaves_of(layer, x))
    assert list(layer.state_dict()) == ["weight"]


def test_defaults() -> None:
    layer = te_fuser.Linear(256, 64, device="cpu")
    assert abs(layer.weight.std() - 0.023) < 1e-3 and abs(layer.weight.mean()) < 1e-3 and (layer.bias == 0).all()
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_is_its_list_bit_for_bit(dtype: torch.dtype) -> None:
    layer, x = made(params_dtype=dtype), tensor(3, 5, IN, dtype=dtype)
    bare = bare_list(layer, ops.MatMul(IN, OUT), ops.Bias(OUT))
    assert_same(layer(x), bare(x), leaves_of(layer, x), tolerance=0)


@pytest.mark.parametrize("split", [SPLIT, dict.fromkeys(SPLIT, 4), {"query": 6, "key": 2, "value": 4}], ids=str)
def test_parameters_split(split: Any) -> None:
    layer, x = made(parameters_split=split), tensor(3, IN)
    names = [f"{n}_{kind}" for kind in ("weight", "bias") for n in ("query", "key", "value")]
    assert list(layer.state_dict()) == names
    sizes = list(split.values()) if isinstance(split, dict) else [4, 4, 4]
    assert [p.shape[0] for p in layer.parameters()] == sizes * 2
    assert_same(layer(x), joined(layer, x), leaves_of(layer, x))


def joined(layer: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (torch.cat([getattr(layer, n) for n in layer.parts[kind]]) for kind in ("weight", "bias"))
    return linear(x, weight, bias)


def test_split_parameters_lie_in_one_buffer() -> None:
    layer, x = made(parameters_split=SPLIT), tensor(3, IN)
    other = made(parameters_split=SPLIT)
    other.load_state_dict(layer.state_dict())
    for one in (layer, other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.float64)):
        assert not any("lie apart" in note for note in one.plan(x).notes)
        storages = {one.get_parameter(name).untyped_storage().data_ptr() for name in one.parts["weight"]}
        assert len(storages) == 1
        torch.testing.assert_close(one(x), joined(layer, x))


def test_a_whole_weight_takes_the_place_of_the_parts() -> None:
    layer, x = made(parameters_split=SPLIT), tensor(3, IN)
    layer(x)
    outer = te_fuser.Sequential(layer, ops.GELU())
    outer(x)
    plain = torch.nn.Linear(IN, OUT).double()
    layer.weight, layer.bias = plain.weight, plain.bias
    assert layer.weight is plain.weight and list(layer.state_dict()) == ["weight", "bias"]
    assert layer.weight.tensor_model_parallel is False
    for one in (layer, copy.deepcopy(layer)):
        torch.testing.assert_close(one(x), plain(x))
    torch.testing.assert_close(outer(x), torch.nn.functional.gelu(plain(x), approximate="tanh"))
    layer(x).sum().backward()
    assert plain.weight.grad is not None
    layer.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("query", "takes names, or names with sizes, got 'query'"),
        (5, "takes names, or names with sizes, got 5"),
        (("a", "a_"), "takes different names"),
        ((), "takes different names"),
        (("a", "b", "c", "d", "e"), "makes 5 equal parts of out_features=12"),
        ({"a": 3, "b": 4}, "has 7 rows, got out_features=12"),
        ({"a": 12.0}, r"parameters_split\['a'\] is a whole number, got 12.0"),
    ],
)
def test_bad_splits(split: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        made(parameters_split=split)


def test_return_bias() -> None:
    layer, x = made(return_bias=True), tensor(3, IN)
    y, bias = layer(x)
    assert bias is layer.bias
    assert_same(y + bias, linear(x, layer.weight, layer.bias), leaves_of(layer, x))
    layer = made(return_bias=True, parameters_split=SPLIT)
    assert_same(sum(layer(x)), joined(layer, x), leaves_of(layer, x))
    y, bias = made(bias=False, return_bias=True)(x)
    assert bias is None and y.shape == (3, OUT)
    for model in (te_fuser.Sequential(layer), te_fuser.Sequential(ops.GELU(), te_fuser.Sequential(layer))):
        with pytest.raises(TypeError, match=r"Linear returns several values, by return_bias"):
            model(x)
    forward_hook(layer)
    with pytest.raises(TypeError, match="return_bias"):
        te_fuser.Sequential(layer, ops.GELU())(x)


def test_weights_of_the_call() -> None:
    layer, x = made(skip_weight_param_allocation=True), tensor(3, IN)
    assert not list(layer.parameters()) and not layer.state_dict()
    w, b = tensor(OUT, IN), tensor(OUT)
    for _ in range(2):
        assert_same(layer(x, w, bias=b), linear(x, w, b), {"x": x, "w": w, "b": b})
    assert torch.equal(copy.deepcopy(layer)(x, w, b), layer(x, w, b))
    y, bias = made(skip_weight_param_allocation=True, return_bias=True)(x, weight=w, bias=b)
    assert bias is b
    torch.testing.assert_close(y, linear(x, w))
    torch.testing.assert_close(made(skip_weight_param_allocation=True, bias=False)(x, w), linear(x, w))
    with pytest.raises(TypeError, match="give weight and bias in the call"):
        layer(x)
    with pytest.raises(TypeError, match="give bias in the call"):
        layer(x, w)
    with pytest.raises(TypeError, match="skip_weight_param_allocation"):
        layer.to_torch()
    with pytest.raises(ValueError, match=r"weight"):
        layer(x, w[:5], b)


def test_weights_of_the_call_in_a_list() -> None:
    """A list around takes them by path, also where a hook makes a border."""
    layer, x, w, b = made(skip_weight_param_allocation=True), tensor(3, IN), tensor(OUT, IN), tensor(OUT)
    model = te_fuser.Sequential(layer, ops.GELU())
    for _ in range(2):
        got = model(x, **{"0.weight": w, "0.bias": b})
        want = torch.nn.functional.gelu(linear(x, w, b), approximate="tanh")
        assert_same(got, want, {"x": x, "w": w, "b": b})
        with pytest.raises(TypeError, match="weight"):
            model(x)
        forward_hook(layer)


@pytest.mark.parametrize("kind", [te_fuser.Linear, te_fuser.LayerNormLinear])
def test_weights_of_the_call_in_lists_in_lists(kind: Any) -> None:
    """Each by the path of its Linear, however deep; looks and the reference take them as calls do."""
    apart = {"skip_weight_param_allocation": True, "device": "cpu", "params_dtype": torch.float64}
    first, second = kind(IN, IN, **apart), kind(IN, IN, bias=False, **apart)
    model = te_fuser.Sequential(te_fuser.Residual(first, ops.GELU()), te_fuser.Sequential(ops.SiLU(), second))
    x, w, v, b = tensor(3, IN), tensor(IN, IN, seed=1), tensor(IN, IN, seed=2), tensor(IN, seed=3)
    given = {"0.0.weight": w, "0.0.bias": b, "1.1.weight": v}
    (plan,) = model.plans(x, **given)
    assert plan.backward

    def meant() -> torch.Tensor:
        return second(torch.nn.functional.silu(x + torch.nn.functional.gelu(first(x, w, b), approximate="tanh")), v)

    leaves = {"x": x, "w": w, "v": v, "b": b, **dict(model.named_parameters())}
    assert_same(model(x, **given), meant(), leaves)
    assert_same(model.reference(x, **given), meant(), leaves)
    with pytest.raises(TypeError, match=r"call the model with \*\*\{'1.1.weight': tensor\}"):
        model(x, **{"0.0.weight": w, "0.0.bias": b})
    with pytest.raises(TypeError, match=r"unknown input '0.weight'.*0.0.bias, 0.0.weight, 1.1.weight"):
        model(x, **given, **{"0.weight": w})


def test_tensors_in_place_of_parameters() -> None:
    layer, x, w, b = made(), tensor(3, IN), tensor(OUT, IN), tensor(OUT)
    assert_same(layer(x, w), linear(x, w, layer.bias), {"x": x, "w": w, "bias": layer.bias})
    assert_same(layer(x, bias=b), linear(x, layer.weight, b), {"x": x, "weight": layer.weight, "b": b})
    torch.testing.assert_close(layer(x), linear(x, layer.weight, layer.bias))
    with pytest.raises(TypeError, match="weight takes a tensor in place of the preset's own, got True"):
        layer(x, True)
    with pytest.raises(ValueError, match="made with bias=False, got a bias"):
        made(bias=False)(x, bias=b)


def test_threads_give_their_own_weights() -> None:
    layer, x, wrong = made(skip_weight_param_allocation=True, bias=False), tensor(3, IN), []

    def run(seed: int) -> None:
        w = tensor(OUT, IN, seed=seed, grad=False)
        for _ in range(20):
            if not torch.allclose(layer(x, w), linear(x, w)):
                wrong.append(seed)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_main_grad() -> None:
    layer, x = made(fuse_wgrad_accumulation=True, params_dtype=torch.float32), tensor(3, IN, dtype=torch.float32)
    layer.weight.main_grad = torch.ones_like(layer.weight)
    want = torch.ones(3, OUT).T @ x.detach()
    for first, expected in ((None, want + 1), (True, want), (False, 2 * want)):
        layer(x, is_first_microbatch=first).sum().backward()
        torch.testing.assert_close(layer.weight.main_grad, expected)
    assert layer.weight.grad is None and layer.bias.grad is not None
    layer.weight.requires_grad_(False)
    layer(x, is_first_microbatch=True).sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, 2 * want)


@pytest.mark.parametrize("kind", [te_fuser.Linear, te_fuser.LayerNormLinear])
@pytest.mark.parametrize("together", [True, False])
def test_main_grad_of_split_parameters(kind: Any, together: bool) -> None:
    """Each has its own; where these lie one behind the other in one buffer, as the weights do, one product adds."""
    layer = randomize(kind(IN, OUT, parameters_split=SPLIT, fuse_wgrad_accumulation=True, device="cpu"))
    x, weights = tensor(3, 5, IN, dtype=torch.float32), [layer.get_parameter(name) for name in layer.parts["weight"]]
    want = torch.autograd.grad(layer.reference(x).sum(), weights)
    lying = torch.full((OUT, IN), 2.0).split(OUT // 3)
    for weight, piece in zip(weights, lying, strict=True):
        weight.main_grad = piece if together else piece.clone()
    for first, times, base in ((None, 1, 2), (True, 1, 0), (False, 2, 0)):
        layer(x, is_first_microbatch=first).sum().backward()
        for weight, one in zip(weights, want, strict=True):
            assert weight.grad is None
            torch.testing.assert_close(weight.main_grad, base + times * one)


def test_main_grad_of_a_weight_of_the_call() -> None:
    layer, x = made(fuse_wgrad_accumulation=True, skip_weight_param_allocation=True, bias=False), tensor(3, IN)
    own = made(fuse_wgrad_accumulation=True, bias=False)
    want = torch.ones(3, OUT, dtype=torch.float64).T @ x.detach()
    for one in (layer, own):
        w = torch.nn.Parameter(tensor(OUT, IN, grad=False))
        w.main_grad = torch.ones_like(w)
        for first, expected in ((None, want + 1), (True, want), (False, 2 * want)):
            y = one(x, w, is_first_microbatch=first)
            torch.testing.assert_close(y, linear(x, w))
            y.sum().backward()
            torch.testing.assert_close(w.main_grad, expected)


def test_a_changed_list_is_changed_in_every_call() -> None:
    layer, x, w = made(fuse_wgrad_accumulation=True), tensor(3, IN), tensor(OUT, IN)
    layer.append(ops.ReLU())
    torch.testing.assert_close(layer(x), linear(x, layer.weight, layer.bias).relu())
    torch.testing.assert_close(layer(x, is_first_microbatch=True), linear(x, layer.weight, layer.bias).relu())
    w.main_grad = torch.zeros_like(w)
    torch.testing.assert_close(layer(x, w, is_first_microbatch=True), linear(x, w, layer.bias).relu())


def test_is_first_microbatch_changes_nothing_else() -> None:
    layer, x = made(), tensor(3, IN)
    for first in (None, True, False):
        assert_same(layer(x, is_first_microbatch=first), linear(x, layer.weight, layer.bias), leaves_of(layer, x))
    assert len(layer.plans_kept()) == 1


@pytest.mark.parametrize(
    ("mode", "weight", "bias"),
    [
        (None, (False, -1, 1), (False, -1, 1, False)),
        ("Column", (True, 0, 1), (True, 0, 1, None)),
        ("ROW", (True, 1, 1), (False, -1, 1, False)),
    ],
)
def test_marks(mode: str | None, weight: Any, bias: Any) -> None:
    layer, x = made(parallel_mode=mode, sequence_parallel=True), tensor(3, IN)
    meta = te_fuser.Linear(IN, OUT, parallel_mode=mode, sequence_parallel=True, device="meta")
    assigned = te_fuser.Linear(IN, OUT, parallel_mode=mode, sequence_parallel=True, device="meta")
    assigned.load_state_dict(layer.state_dict(), assign=True)
    twins = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.to(torch.float64)
    for twin in (layer, *twins, meta.to_empty(device="cpu"), assigned):
        marks = ("tensor_model_parallel", "partition_dim", "partition_stride")
        assert tuple(getattr(twin.weight, name) for name in marks) == weight
        assert tuple(getattr(twin.bias, name, None) for name in (*marks, "sequence_parallel")) == bias
    for twin in (*twins, assigned):
        torch.testing.assert_close(twin(x), layer(x))


def test_parallel_mode() -> None:
    with pytest.raises(ValueError, match="parallel_mode='diagonal' is unknown; use one of 'column', 'row'"):
        made(parallel_mode="diagonal")
    assert te_fuser.Linear(8, 6, parallel_mode="column", tp_size=2, device="cpu").weight.shape == (3, 8)
    assert te_fuser.Linear(8, 6, parallel_mode="row", tp_size=2, device="cpu").weight.shape == (6, 4)
    with pytest.raises(ValueError, match="out_features=12 cannot be cut into 5 equal parts"):
        made(parallel_mode="column", tp_size=5)
    for layer in (made(tp_size=2), te_fuser.Sequential(made(tp_size=2))):
        with pytest.raises(RuntimeError, match=r"tp_size=2 takes a group: call set_tensor_parallel_group\(group\)"):
            layer(tensor(3, IN))


def test_groups_of_one_rank(tmp_path: Path) -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        x = tensor(3, IN)
        layer = made(tp_group=group, parallel_mode="column", sequence_parallel=True)
        assert layer.tp_group is group and layer.tp_size == 1
        parallel = torch.nn.parallel.DistributedDataParallel(layer)
        assert_same(parallel(x), linear(x, layer.weight, layer.bias), leaves_of(layer, x))
        assert copy.deepcopy(layer).tp_group is group
        assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))
        layer = made()
        outer = te_fuser.Sequential(layer)
        outer(x)
        layer.set_tensor_parallel_group(group)
        assert torch.equal(outer(x), layer(x))
        cut = te_fuser.Linear(8, 6, tp_size=2, device="cpu")
        cut.set_tensor_parallel_group(group)
        with pytest.raises(RuntimeError, match="made for tp_size=2, its tp_group has 1 ranks"):
            cut(torch.randn(3, 8))
    finally:
        dist.destroy_process_group()
    with pytest.raises(TypeError, match="tp_group is a group of torch.distributed's, got 'tp'"):
        made(tp_group="tp")


def test_a_group_of_another_size_is_noticed_by_lists_around() -> None:
    layer, x = made(), tensor(3, IN)
    outer = te_fuser.Sequential(layer, ops.GELU())
    outer(x)
    layer.set_tensor_parallel_group(ops.Group("others", 2))
    for model in (layer, outer):
        with pytest.raises(RuntimeError, match="made for tp_size=1, its tp_group has 2 ranks: make it with tp_size=2"):
            model(x)


def test_random_states_of_a_tracker() -> None:
    tracker = te_fuser.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    tracker.add("other", 6)
    torch.manual_seed(0)
    keywords = {"get_rng_state_tracker": lambda: tracker, "device": "cpu" if not torch.cuda.is_available() else "cuda"}
    first, outside = te_fuser.Linear(IN, OUT, **keywords), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), outside)
    second = te_fuser.Linear(IN, OUT, **keywords)
    named = te_fuser.Linear(IN, OUT, rng_tracker_name="other", **keywords)
    assert not torch.equal(first.weight, second.weight) and not torch.equal(named.weight, first.weight)
    again = te_fuser.CudaRNGStatesTracker()
    again.add("model-parallel-rng", 5)
    third = te_fuser.Linear(IN, OUT, **{**keywords, "get_rng_state_tracker": lambda: again})
    assert torch.equal(third.weight, first.weight)


def test_to_torch_and_back() -> None:
    for layer in (made(), made(parameters_split=SPLIT), made(bias=False)):
        x = tensor(3, IN)
        plain = layer.to_torch()
        assert type(plain) is torch.nn.Linear
        torch.testing.assert_close(plain(x), layer(x))
        torch.testing.assert_close(te_fuser.from_torch(plain)(x), layer(x))
        with torch.no_grad():
            plain.weight.zero_()
        assert layer(x).abs().max() > 0.1


def test_in_lists_and_with_hooks() -> None:
    layer, x = made(IN, IN), tensor(3, IN)
    model = te_fuser.Sequential(layer, ops.GELU(), made(IN, OUT))
    assert len(model.plan(x).graph.nodes) == 5
    want = model(x)
    seen = forward_hook(layer)
    torch.testing.assert_close(model(x), want)
    assert seen == [1] and len(model.plans(x)) == 1
    stack = te_fuser.Sequential(*(made(IN, IN) for _ in range(4)))
    assert len(stack.plans(x)) == 1


@pytest.mark.parametrize("rows", [0, 1, 13])
def test_any_number_of_rows(rows: int) -> None:
    layer, x = made(), tensor(rows, IN)
    assert_same(layer(x), linear(x, layer.weight, layer.bias), leaves_of(layer, x))
    wide = tensor(2, rows, 2 * IN)[..., ::2]
    torch.testing.assert_close(layer(wide), linear(wide, layer.weight, layer.bias))


def test_modes() -> None:
    layer, x = made(params_dtype=torch.float32, return_bias=True), tensor(3, IN, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y, bias = layer(x)
    assert y.dtype == bias.dtype == torch.bfloat16
    with torch.no_grad():
        assert not layer(x)[0].requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(sum(layer(x)), linear(x, layer.weight, layer.bias))


def test_verify() -> None:
    assert te_fuser.verify(made(params_dtype=torch.float32), torch.randn(4, IN)).passed


@pytest.mark.parametrize("name", ["fp8_output", "fp8_grad"])
def test_fp8_of_a_call(name: str) -> None:
    for layer in (made(), te_fuser.LayerNormLinear(IN, OUT, device="cpu", params_dtype=torch.float64)):
        x = tensor(3, IN)
        assert torch.equal(layer(x, **{name: False}), layer(x))
        with pytest.raises(NotImplementedError, match=f"{name} asks for a result in 8 bits"):
            layer(x, **{name: True})
