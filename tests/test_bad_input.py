"""Bad input: an error before anything is computed, that names op and position, what it got, and what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.device import DEVICES
from tests.refused import refused
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(5, 8)
C = tensor(5, 8, seed=1)


def attention(mask="given"):
    return ops.DotProductAttention(2, 4, mask=mask, layout="batch_first")


def without(op, name):
    setattr(op, name, None)
    return op


QKV = tensor(2, 5, 24)

# what is wrong -> ops, x, the call's other arguments, the error, what its message says
CALLS = {
    "feature_size": (lambda: [ops.GELU(), ops.Linear(6, 8)], X, {}, ValueError,
     [r"^op 1 \(MatMul '1\.matmul'\)", "made for 6 features, got 8", r"shape \[5, 8\]", r"give it \[\.\.\., 6\]"]),
    "feature_size_inside": (lambda: [te_fuser.Residual(ops.Linear(8, 16), te_fuser.Sequential(ops.LayerNorm(8)))], X,
     {}, ValueError, [r"^op 3 \(LayerNorm '0\.1\.0'\)", "made for 8 features, got 16", "or make it with 16"]),
    "odd_features_of_a_gate": (lambda: [ops.Linear(8, 7), ops.SwiGLU()], X, {}, ValueError,
     [r"^op 2 \(SwiGLU '1'\)", "even number of features", "got 7", "make the layer before it twice as wide"]),
    "no_features": (lambda: [ops.GELU()], tensor(5, 0), {}, ValueError,
     [r"^op 0 \(GELU '0'\): takes at least 1 feature", r"shape \[5, 0\]"]),
    "no_features_of_a_norm": (lambda: [ops.LayerNorm(0)], tensor(5, 0), {}, ValueError, [r"^op 0 \(LayerNorm '0'\)"]),
    "dtype_of_a_weight": (lambda: [ops.GELU(), ops.Linear(8, 8, dtype=torch.float32)], X, {}, TypeError,
     [r"^op 1 \(MatMul '1\.matmul'\)", "weight is float32, its input float64",
     r"convert the input with \.to\(torch\.float32\), or the model with \.to\(torch\.float64\)$"]),
    "dtype_of_a_norm": (lambda: [ops.LayerNorm(8, dtype=torch.bfloat16)], X, {}, TypeError,
     [r"^op 0 \(LayerNorm '0'\)", "weight is bfloat16, its input float64",
     r"convert the input with \.to\(torch.bfloat16"]),
    "dtype_in_the_middle": (lambda: [ops.Cast(torch.bfloat16), ops.Linear(8, 8, dtype=torch.float32)], X, {},
     TypeError, [r"^op 1 \(MatMul", "weight is float32, its input bfloat16"]),
    "dtype_of_a_named_input": (lambda: [ops.GELU(), ops.Add("c")], X, {"c": C.float()}, TypeError,
     [r"^op 1 \(Add '1'\): 'c' is float32, the main input float64; convert one with \.to\(\)"]),
    "missing_input": (lambda: [ops.GELU(), ops.Add("skip")], X, {}, ValueError,
     [r"^op 1 \(Add '1'\) reads 'skip', which no Fork before it binds", r"pass it: model\(x, skip=\.\.\.\)",
     "given: none"]),
    "missing_among_others": (lambda: [ops.Add("a"), ops.Add("b")], X, {"a": C}, ValueError,
     [r"^op 1 \(Add '1'\) reads 'b'", "given: a"]),
    "missing_mask": (lambda: [attention()], QKV, {}, ValueError,
     [r"^op 0 \(DotProductAttention '0'\) reads 'attention_mask'", r"pass it: model\(x, attention_mask=\.\.\.\)"]),
    "read_before_it_is_bound": (lambda: [ops.Add("a"), ops.Fork("a"), ops.Add("a")], X, {}, ValueError,
     [r"^op 0 \(Add '0'\) reads 'a'", r"before it binds .*\('1', a later op, binds it: move that before its use;"]),
    "unknown_input": (lambda: [ops.GELU(), ops.Add("c")], X, {"c": C, "mask": C}, TypeError,
     ["^unknown input 'mask': no op of this list reads it", "named inputs: c"]),
    "unknown_input_of_a_split_list": (lambda: [ops.Add("c"), nn.Identity(), ops.Add("d")], X,
     {"c": C, "d": C, "mask": C}, TypeError, ["^unknown input 'mask'", "named inputs: c, d"]),
    "input_that_is_no_tensor": (lambda: [ops.Add("c")], X, {"c": [1.0]}, TypeError,
     [r"^input 'c' takes a torch.Tensor, got list: give torch\.tensor\(x\)$"]),
    "never_closed": (lambda: [ops.GELU(), ops.Fork("a"), ops.GELU()], X, {}, ValueError,
     [r"^op 1 \(Fork '1'\) opens 'a', but no Add\('a'\) after it closes it", "add one, or use Output"]),
    "never_closed_in_its_scope": (lambda: [te_fuser.Sequential(ops.Fork("a"), ops.GELU()), ops.GELU()], X, {},
     ValueError, [r"^op 0 \(Fork '0\.0'\) opens 'a'"]),
    "opened_twice": (lambda: [ops.Fork("a"), ops.GELU(), ops.Fork("a"), ops.Add("a")], X, {}, ValueError,
     [r"^op 2 \(Fork '2'\) opens 'a', which op 0 \(Fork '0'\) opened and nobody closed yet"]),
    "branch_of_another_shape": (lambda: [te_fuser.Residual(ops.Linear(8, 4))], X, {}, ValueError,
     [r"^op 3 \(Add '0'\): 'residual' has shape \[5, 8\], the main input \[5, 4\]; they must be equal"]),
    "shape_of_a_named_input": (lambda: [ops.Add("c")], X, {"c": tensor(1, 8)}, ValueError,
     [r"^op 0 \(Add '0'\): 'c' has shape \[1, 8\], the main input \[5, 8\]; they must be equal"]),
    "integers": (lambda: [ops.GELU()], torch.ones(5, 8, dtype=torch.int64), {}, TypeError,
     [r"^op 0 \(GELU '0'\)", "got int64: put a torch.nn.Embedding before it", r"else convert with \.float\(\)"]),
    "booleans_by_name": (lambda: [ops.GELU(), ops.Add("c")], X, {"c": torch.ones(5, 8, dtype=torch.bool)}, TypeError,
     [r"^op 1 \(Add '1'\), input 'c'", "takes floating-point tensors, got bool"]),
    "eight_bits": (lambda: [ops.GELU()], torch.ones(5, 8).to(torch.float8_e4m3fn), {}, TypeError,
     [r"^op 0 \(GELU '0'\)", "takes float32, bfloat16, float16, float64, got float8_e4m3fn", r"\.bfloat16\(\)"]),
    "complex": (lambda: [ops.GELU()], torch.ones(5, 8, dtype=torch.complex64), {}, TypeError,
     ["floating-point tensors, got complex64"]),
    "mask_shape": (lambda: [attention()], QKV, {"attention_mask": torch.zeros(2, 1, 4, 5, dtype=torch.bool)},
     ValueError, [r"^op 0 \(DotProductAttention '0'\): 'attention_mask' has shape \[2, 1, 4, 5\]",
     r"= \[2, 2, 5, 5\]"]),
    "mask_dtype": (lambda: [attention()], QKV, {"attention_mask": torch.zeros(2, 1, 5, 5)}, TypeError,
     [r"^op 0 \(DotProductAttention '0'\)", "'attention_mask'.*bool", "float32"]),
    "packed_heads": (lambda: [attention(mask="none")], tensor(2, 5, 20), {}, ValueError,
     [r"^op 0 \(DotProductAttention '0'\)", r"= 24 features, got 20", "give the projection before it 24"]),
    "dimensions_of_attention": (lambda: [attention(mask="none")], tensor(10, 24), {}, ValueError,
     [r"^op 0 \(DotProductAttention '0'\) takes|^op 0 .*takes \[batch, sequence, features\], got 2 dimensions"]),
    "samples": (lambda: [ops.AdaptiveLayerNorm(8, batch_dim=0)], tensor(3, 4, 8),
     {"scale": tensor(3, 8), "shift": tensor(4, 8)}, ValueError,
     [r"^op 0 \(AdaptiveLayerNorm '0'\)", r"'shift'", r"\[4, 8\]", r"\[3, 8\]"]),
    "elements": (lambda: [ops.Reshape(3, 8)], X, {}, ValueError,
     [r"^op 0 \(Reshape '0'\)", r"shape \[3, 8\] holds 24 elements, got 40"]),
    "device_of_a_parameter": (lambda: [ops.GELU(), ops.Linear(8, 8, dtype=torch.float64, device="meta")], X, {},
     ValueError, [r"^op 1 \(MatMul", "weight is on meta, its input on cpu", r"move one with \.to\(\)"]),
    "device_of_a_named_input": (lambda: [ops.Add("c")], X, {"c": C.detach().to("meta")}, ValueError,
     [r"^op 0 \(Add '0'\): 'c' is on meta, the main input on cpu; move one with \.to\(\)"]),
    "device_of_a_mask": (lambda: [attention()], QKV,
     {"attention_mask": torch.zeros(2, 1, 5, 5, dtype=torch.bool, device="meta")}, ValueError,
     ["'attention_mask' is on meta, the main input on cpu"]),
    "meta_input": (lambda: [ops.GELU()], X.detach().to("meta"), {}, TypeError,
     ["meta tensor, which has no values; move", r'plan\(x, device="h200"\)']),
    "no_tensor": (lambda: [ops.GELU()], [1.0], {}, TypeError, ["takes a torch.Tensor, got list"]),
    "scalar": (lambda: [ops.GELU()], tensor(), {}, ValueError, [r"takes \[\.\.\., features\], got a scalar"]),
    "sparse": (lambda: [ops.GELU()], torch.eye(8).to_sparse(), {}, TypeError, [r"dense.*call \.to_dense\(\) first$"]),
    "negative": (lambda: [ops.GELU()], torch._neg_view(X), {}, TypeError, [r"call \.resolve_neg\(\) first$"]),
    "conjugate": (lambda: [ops.GELU()], (X + 0j).conj(), {}, TypeError, [r"call \.resolve_conj\(\) first$"]),
    "negative_by_name": (lambda: [ops.Add("c")], X, {"c": torch._neg_view(C)}, TypeError,
     [r"^input 'c': .*call \.resolve_neg\(\) first$"]),
    "nested": (lambda: [ops.GELU()], torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]), {}, TypeError,
     [r"dense, materialized tensors; call \.to_padded_tensor\(\) first$"]),
    "nested_by_name": (lambda: [ops.Add("c")], X,
     {"c": torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])}, TypeError,
     [r"^input 'c': te_fuser takes dense"]),
    "sparse_by_name": (lambda: [ops.Add("c")], X, {"c": torch.eye(8).to_sparse()}, TypeError, [r"^input 'c': .*dense"]),
    "no_weight": (lambda: [without(ops.Bias(8), "bias")], X, {}, ValueError,
     [r"^op 0 \(Bias '0'\): parameter bias is None, and the op computes with it; give it a tensor"]),
    "no_weight_of_a_product": (lambda: [ops.GELU(), without(ops.MatMul(8, 8), "weight")], X, {}, ValueError,
     [r"^op 1 \(MatMul '1'\): parameter weight is None"]),
    "unknown_output": (lambda: [ops.GELU(), ops.Output("a")], X, {"outputs": ("b",)}, ValueError,
     [r"no Output\('b'\) in this list \(outputs: a\)"]),
}  # fmt: skip


def doubled(parts):
    """The parts in float64, but for those that were given another dtype or device on purpose, unlike twins'."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return te_fuser.Sequential(*parts(), kernels="reference").requires_grad_(True)
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    """Also model.plan(...) says it, without a call before; but it needs no values."""
    parts, x, arguments, error, words = CALLS[name]
    model, planned = doubled(parts), doubled(parts)
    refused(error, words, lambda: model(x, **arguments))
    if "split" not in name and name != "meta_input":
        refused(error, words, lambda: planned.plan(x, **arguments))


@pytest.mark.parametrize(
    "name",
    ["feature_size", "mask_shape", "mask_dtype", "integers", "shape_of_a_named_input", "device_of_a_named_input"],
)
def test_calls_after_good_ones(name):
    """A plan that was made for a good call does not let a bad one through."""
    parts, x, arguments, error, words = CALLS[name]
    model = doubled(parts)
    if name == "feature_size":
        model(tensor(5, 6))
    elif name.startswith("mask"):
        model(QKV, attention_mask=torch.zeros(2, 1, 5, 5, dtype=torch.bool))
    else:
        model(X, **({"c": C} if arguments else {}))
    refused(error, words, lambda: model(x, **arguments))


def test_the_part_before_a_plain_module_runs_but_nothing_of_the_bad_one():
    model = sequential(ops.GELU(), nn.Identity(), ops.Linear(6, 8), ops.GELU())
    with pytest.raises(ValueError, match=r"op 0 \(MatMul '2\.matmul'\): MatMul was made for 6 features, got 8"):
        model(X)
    model = sequential(ops.GELU(), nn.MultiheadAttention(8, 1), ops.GELU())
    model[1].forward = lambda x: (x, None)
    with pytest.raises(TypeError, match="takes a torch.Tensor, got tuple"):
        model(X)


def test_a_fork_that_nobody_closes_before_or_after_a_plain_module():
    model = sequential(ops.GELU(), ops.Fork("a"), nn.Identity(), ops.GELU())
    with pytest.raises(ValueError, match=r"op 1 \(Fork '1'\) opens 'a', but no Add\('a'\) after it closes it"):
        model(X)


def test_double_backward():
    model = sequential(ops.Linear(8, 8), ops.GELU())
    words = r"does not differentiate its backward: call backward\(\) without create_graph=True, or use model\.reference"
    for y in (model(X), ops.GELU()(X)):
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(y.sum(), X, create_graph=True)


@pytest.mark.parametrize("given", [nn.Linear(8, 8), nn.Linear, ops.GELU, te_fuser.Sequential(ops.GELU()), None])
def test_a_fuser_of_what_is_no_op(given):
    words = [
        "^a Fuser takes ops, got ",
        "plain modules go into a Sequential",
        "of a class make one" * isinstance(given, type),
    ]
    refused(TypeError, words, lambda: te_fuser.Fuser([ops.GELU(), given]))


def test_a_device_that_is_no_name():
    model = sequential(ops.GELU())
    for call in (model.plan, model.plans, model.explain):
        for device in (torch.device("cpu"), 0):
            words = [
                "a device to plan for is a name, like 'h200'",
                f"got {re.escape(repr(device))}",
                "leave device= out",
            ]
            refused(TypeError, words, lambda call=call, device=device: call(X, device=device))
        for place in ("cuda", "cuda:0", "Meta"):
            words = [
                f"unknown device '{place}'",
                "known: cpu, h200",
                "to plan for the device that x is on, leave device=",
            ]
            refused(ValueError, words, lambda call=call, place=place: call(X, device=place))
    assert model.plan(X, device=DEVICES["h100"]).device.name == "h100"


@pytest.mark.parametrize(
    "effort", [{"rounds": 0}, {"rounds": 1.5}, {"seconds": 0}, {"seconds": float("nan")}, {"margin": 1.0}]
)
def test_an_effort_that_measures_nothing(effort):
    (name,) = effort
    refused(ValueError, [f"^{name} "], lambda: sequential(ops.GELU()).tune(X, **effort))


def test_generated_kernels_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr("te_fuser.codegen.compiler.find_compiler", lambda *a, **k: None)
    model, x = te_fuser.Sequential(ops.GELU(), kernels="generated"), X.detach().float()
    refused(RuntimeError, ["generated kernels were asked for, but no C.. compiler was found"], lambda: model(x))


# ------------------------------------------------------------------------------------ what is no bad input

GOOD = {
    "empty": tensor(0, 8),
    "empty_inside": tensor(3, 0, 8),
    "transposed": tensor(8, 5, grad=False).t(),
    "every_other_feature": tensor(5, 16, grad=False)[:, ::2],
    "broadcast": tensor(1, 8, grad=False).expand(5, 8),
    "broadcast_features": tensor(5, 1, grad=False).expand(5, 8),
    "permuted": tensor(8, 3, 5, grad=False).permute(1, 2, 0),
    "one_row": tensor(8),
    "channels_last": tensor(2, 3, 4, 8, grad=False).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_input(name):
    x = GOOD[name].detach().requires_grad_()
    other = GOOD[name].detach().requires_grad_()
    model = sequential(
        ops.LayerNorm(8),
        ops.Linear(8, 16),
        ops.GEGLU(),
        te_fuser.Residual(ops.Linear(8, 8), ops.Dropout(0.5)),
        ops.Add("c"),
    )
    assert_as_meant(model, x, c=other)


@pytest.mark.parametrize("name", ["x", "c"])
def test_a_negative_tensor_is_refused_of_a_call_like_the_last(name: str) -> None:
    model, given = te_fuser.Sequential(ops.Add("c")), {"x": X.detach(), "c": C.detach()}
    for _ in range(2):
        model(**given)
    with pytest.raises(TypeError, match=r"call \.resolve_neg\(\) first$"):
        model(**{**given, name: torch._neg_view(given[name])})


def test_a_negative_parameter_is_refused() -> None:
    model = te_fuser.Sequential(ops.Scale(8))
    model[0].weight = torch.nn.Parameter(torch._neg_view(torch.rand(8)))
    with pytest.raises(TypeError, match=r"^weight has its negative bit set: put weight\.resolve_neg\(\) in its place"):
        model(X)


@pytest.mark.parametrize("ends", [1, 2])
def test_gradients_that_arrive_with_a_negative_bit(ends: int) -> None:
    model = te_fuser.Sequential(ops.GELU(), ops.Output("inner"), ops.SiLU())
    x = X.detach().float().requires_grad_()
    y = model(x, outputs=("inner",)) if ends == 2 else model(x)
    dy = [torch.randn_like(x) for _ in range(ends)]
    found, wanted = (
        torch.autograd.grad(y, x, [wrap(g) for g in dy], retain_graph=True)[0]
        for wrap in (lambda g: torch._neg_view(-g), lambda g: g)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
