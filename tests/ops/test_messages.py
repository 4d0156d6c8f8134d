"""Words of an op, a list or a call that is wrong: each says the line to write, before anything is computed."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.formula import clamp, row_sum, split
from te_fuser.ops.base import FusableOperation
from tests.ops.check import spec
from tests.refused import raises, refusals, refused
from tests.twins import assert_as_meant, sequential, tensor

OPS: dict[str, FusableOperation] = {
    "bias": ops.Bias(8),
    "scale": ops.Scale(8),
    "scale_constant": ops.Scale(value=2.0),
    "gelu": ops.GELU(),
    "relu": ops.ReLU(),
    "swiglu": ops.SwiGLU(),
    "layer_norm": ops.LayerNorm(8),
    "rms_norm": ops.RMSNorm(8),
    "l2_norm": ops.L2Norm(),
    "adaptive": ops.AdaptiveLayerNorm(8, batch_dim=0),
    "dropout": ops.Dropout(),
    "drop_path": ops.DropPath(0.1, batch_dim=0),
    "cast": ops.Cast(torch.bfloat16),
    "fork": ops.Fork("a"),
    "add": ops.Add("a"),
    "matmul": ops.MatMul(8, 4),
    "linear": ops.Linear(8, 4),
    "reshape": ops.Reshape(-1, 8),
}


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
@pytest.mark.parametrize("name", OPS)
def test_integers(name: str, dtype: torch.dtype) -> None:
    got = str(dtype).removeprefix("torch.")
    ids = "put a torch.nn.Embedding before it where these are ids of tokens, else " if dtype == torch.int64 else ""
    words = rf"te_fuser ops take floating-point tensors, got {got}: {ids}convert with \.float\(\)"
    raises(TypeError, words, lambda: OPS[name].infer(spec(3, 2, 8, dtype=dtype)))


@pytest.mark.parametrize("name", ["bias", "scale", "layer_norm", "rms_norm", "adaptive", "matmul", "linear"])
def test_wrong_feature_size(name: str) -> None:
    words = r"was made for 8 features, got 7 \(input shape \[3, 2, 7\]\): give it \[\.\.\., 8\] or make it with 7"
    raises(ValueError, words, lambda: OPS[name].infer(spec(3, 2, 7)))
    raises(ValueError, "got a scalar", lambda: OPS[name].infer(spec()))


@pytest.mark.parametrize("kind", [ops.GLU, ops.GEGLU, ops.QGEGLU, ops.ReGLU, ops.SReGLU, ops.SwiGLU, ops.ClampedSwiGLU])
def test_odd_feature_size(kind: type[ops.GatedUnit]) -> None:
    with pytest.raises(ValueError, match=rf"{kind.__name__} takes an even number of features.*got 7.*twice as wide"):
        kind().infer(spec(3, 7))


@pytest.mark.parametrize("batch_dim", [2, -1, 5, -4])
def test_batch_dim(batch_dim: int) -> None:
    for op in (ops.DropPath(0.1, batch_dim=batch_dim), ops.AdaptiveLayerNorm(8, batch_dim=batch_dim)):
        words = rf"along dimension {batch_dim}, which is no dimension before .*\[3, 2, 8\]"
        raises(ValueError, words, op.infer, spec(3, 2, 8))


def test_adaptive_inputs_of_another_shape() -> None:
    op = ops.AdaptiveLayerNorm(8, scale="gamma", batch_dim=1)
    op.check_inputs(spec(3, 2, 8), {"scale": spec(2, 8), "shift": spec(2, 8)})
    with pytest.raises(ValueError, match=r"'gamma' of shape \[2, 8\].*along dimension 1 of \[3, 2, 8\].*got \[3, 8\]"):
        op.check_inputs(spec(3, 2, 8), {"scale": spec(3, 8), "shift": spec(2, 8)})


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "gelu_form": (lambda: ops.GELU("fast"), ValueError, "'tanh' and 'none', got 'fast'"),
    "limit": (lambda: ops.ClampedSwiGLU(limit=0.0), ValueError, "positive limit, got 0.0"),
    "limit_text": (lambda: ops.ClampedSwiGLU("a", 1), TypeError, "ClampedSwiGLU takes a number as limit, got 'a'"),  # type: ignore[arg-type]
    "gate_text": (lambda: ops.SwiGLU("no"), TypeError, "SwiGLU takes True or False as gate_first, got 'no'"),  # type: ignore[arg-type]
    "block": (lambda: ops.GLU(glu_interleave_size=0), ValueError, "GLU takes a whole number from 1 on as glu_interl"),
    "causal": (
        lambda: ops.AttentionMask(causal="yes"),  # type: ignore[arg-type]
        TypeError,
        "AttentionMask takes True or False as causal, got 'yes'",
    ),
    "longest": (
        lambda: ops.AttentionMask(longest="a", offsets="o"),  # type: ignore[arg-type]
        TypeError,
        "AttentionMask takes a whole number as longest, got 'a'",
    ),
    "window": (lambda: ops.AttentionMask(window=3), ValueError, r"window is \(left, right\), .* got 3"),  # type: ignore[arg-type]
    "window_text": (lambda: ops.AttentionMask(window=("a", 1)), ValueError, "None for all; got"),  # type: ignore[arg-type]
    "heads": (lambda: ops.HeadNorm(4, heads=-1), ValueError, "HeadNorm takes a whole number from 1 on as heads"),
    "keys_alone": (lambda: ops.HeadNorm(4, heads=-1, kv_heads=2), ValueError, "from 0 on as heads, got -1"),
    "head_dim": (lambda: ops.HeadNorm("4", heads=1), TypeError, "HeadNorm takes a whole number as head_dim, got '4'"),  # type: ignore[arg-type]
    "no_heads": (lambda: ops.RotaryByAngles(4, heads=0), ValueError, "RotaryByAngles takes a whole number from 1 on"),
    "angles": (
        lambda: ops.RotaryByAngles(4, heads=1, angles=("a",)),  # type: ignore[arg-type]
        ValueError,
        r"RotaryByAngles takes a name, or a pair of names as angles, got \('a',\)",
    ),
    "cos": (lambda: ops.RotaryByAngles(4, heads=1, cos_sin="a"), ValueError, "a pair of names as cos_sin, got 'a'"),  # type: ignore[arg-type]
    "samples": (lambda: ops.DropPath(0.5, "x"), TypeError, "DropPath takes a whole number as batch_dim, got 'x'"),  # type: ignore[arg-type]
    "fill": (lambda: ops.Linear(4, 4, init_method=3), TypeError, "Linear takes a function as init_method, or None"),  # type: ignore[arg-type]
    "per": (lambda: ops.AdaptiveLayerNorm(8, per="batch"), ValueError, "'sample' or per 'row', got per='batch'"),
    "no_batch_dim": (lambda: ops.AdaptiveLayerNorm(8), ValueError, "needs batch_dim"),
    "two_dimensions": (lambda: ops.Bias((4, 8)), ValueError, r"last dimension alone, got \[4, 8\]: flatten"),
    "a_float": (lambda: ops.LayerNorm(8.0), TypeError, r"features is a whole number, got 8\.0"),  # type: ignore[arg-type]
    "no_number": (lambda: ops.Dropout("half"), TypeError, r"a number in \[0, 1\], got 'half'"),  # type: ignore[arg-type]
    "eight_bits": (
        lambda: ops.Cast(torch.float8_e5m2),
        TypeError,
        "got torch.float8_e5m2: float32, bfloat16, float16 or float64",
    ),
    "integers": (lambda: ops.Cast(torch.int32), TypeError, "dtype such as torch.bfloat16, got torch.int32"),
    "no_batch_dim_of_samples": (lambda: ops.DropPath(0.1), TypeError, "batch_dim"),  # type: ignore[call-arg]
    "a_keyword": (lambda: ops.Fork("class"), ValueError, "usable as a keyword argument.*got 'class'"),
    "an_argument": (lambda: ops.Add("outputs"), ValueError, "'outputs' is an argument of every call"),
    "negative": (lambda: ops.Linear(-1, 4), ValueError, "in_features is a size, got -1"),
    "fraction": (lambda: ops.MatMul(4, (2.5,)), TypeError, "out_features is a whole number"),  # type: ignore[arg-type]
    "two_unknown_sizes": (lambda: ops.Reshape(-1, -1), ValueError, r"one may be -1, got \[-1, -1\]"),
    "reshape": (lambda: ops.Reshape(5, 5).infer(spec(3, 8)), ValueError, r"\[3, 8\].*holds 25 elements, got 24"),
    "reshape_rest": (lambda: ops.Reshape(-1, 5).infer(spec(3, 8)), ValueError, r"no size in place of -1.*24 elements"),
    "reshape_nothing": (lambda: ops.Reshape(-1, 0).infer(spec(0, 8)), ValueError, "no size in place of -1"),
}


test_wrong_arguments = refusals(WRONG)


X58 = tensor(5, 8)


class Typo(ops.RowOp):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def compute(self, x, wieght):
        return x * wieght


class Narrow(ops.RowOp):
    def compute(self, x):
        return split(x, 2)[0]

    def infer(self, x):
        return x


class Starred(ops.RowOp):
    def compute(self, x, *others):
        return x


class Default(ops.RowOp):
    def compute(self, x, factor=3.0):
        return x * factor


class NoX(ops.RowOp):
    def compute(self):
        return 1.0


class Nothing(ops.RowOp):
    pass


def formula(f):
    class Given(ops.RowOp):
        def compute(self, x):
            return f(x)

    return Given


USE_FORMULA = "a formula is written with the functions of te_fuser.formula"


FORMULAS = {
    "one_per_row": (formula(row_sum), ValueError,
     [r"^op 1 \(Given '1'\)", "a value for every feature, got one per row"]),
    "a_function_of_torch": (formula(torch.tanh), TypeError, [r"^op 1 \(Given '1'\)", USE_FORMULA]),
    "a_method": (formula(lambda x: x.tanh()), TypeError, [r"^op 1 \(Given '1'\)", "no attribute 'tanh'", USE_FORMULA]),
    "an_index": (formula(lambda x: x[0]), TypeError, [r"^op 1 \(Given '1'\)", USE_FORMULA]),
    "a_branch": (formula(lambda x: x if x > 0 else -x), TypeError, [r"^op 1 \(Given '1'\)", "use where"]),
    "a_tuple": (formula(lambda x: (x, x)), TypeError, [r"^op 1 \(Given '1'\)", "expressions and numbers, not tuple"]),
    "clamped_by_tensors": (formula(lambda x: clamp(x, x * 0.5, x * 2.0)), TypeError, [r"^op 1 \(Given '1'\)",
     r"clamp takes numbers as limits, got a tensor; by tensors: minimum\(maximum\(x, low\), high\)"]),
    "clamped_by_nothing": (formula(lambda x: clamp(x, None, 1.0)), TypeError,
     ["clamp takes numbers as limits, got None"]),
    "thirds_of_eight": (formula(lambda x: split(x, 3)[0]), ValueError, [r"^op 1 \(Given '1'\)", "8 features into 3"]),
    "another_width": (Narrow, ValueError,
     [r"^op 1 \(Narrow '1'\): compute\(\) gives 4 features, infer\(\) says 8", r"with_features\(4\)"]),
    "a_misspelt_parameter": (Typo, ValueError,
     [r"^op 1 \(Typo '1'\) reads 'wieght'", r"parameters that compute\(\) does not take: weight"]),
    "starred": (Starred, TypeError, [r"Starred.compute takes \*others: its arguments after x are tensors"]),
    "a_default": (Default, TypeError,
     [r"Default.compute takes factor=3.0", r"an attribute of the op, read as self\.factor"]),
    "no_x": (NoX, TypeError, [r"NoX.compute takes no x: define compute\(self, x, \.\.\.\)"]),
    "none_at_all": (Nothing, TypeError, [r"Nothing has no formula: define compute\(self, x, \.\.\.\)"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name):
    kind, error, words = FORMULAS[name]
    model = te_fuser.Sequential(ops.GELU(), kind(), kernels="reference")
    x = X58.detach()
    refused(error, words, lambda: model(x))


class Forgetful(ops.RowOp):
    def __init__(self):
        self.factor = 2.0

    def compute(self, x):
        return self.factor * x


@pytest.mark.parametrize("use", [lambda op: op(X58), lambda op: te_fuser.Sequential(op)(X58), repr])
def test_an_op_whose_constructor_does_not_call_that_of_its_base(use):
    raises(AttributeError, r"^Forgetful: its __init__ must first call super\(\)\.__init__\(\)$", use, Forgetful())


NAN, INF = float("nan"), float("inf")

IDS = torch.ones(2, 8, dtype=torch.int64)
EMBED = "got int64: put a torch.nn.Embedding before it where these are ids of tokens"
LIST = r"takes modules, got {}: write {}\(\*layers\)"


def layers() -> list[nn.Module]:
    return [ops.LayerNorm(8), ops.GELU()]


def model() -> Sequential:
    return Sequential(*layers())


def preset() -> nn.Module:
    return te_fuser.LayerNormLinear(8, 8, device="cpu")


def scripted(module: nn.Module) -> Callable[[], Any]:
    return lambda: torch.jit.script(module)


# Call -> the error's words.
WORDS: dict[str, tuple[Callable[[], Any], str]] = {
    "ids": (lambda: model()(IDS), EMBED),
    "ids_of_an_op": (lambda: ops.Linear(8, 8)(IDS.int()), EMBED.replace("int64", "int32")),
    "ids_of_a_preset": (lambda: preset()(IDS), EMBED),
    "module_list": (lambda: Sequential(nn.ModuleList(layers())), LIST.format("ModuleList", "Sequential")),
    "a_list": (lambda: Sequential(layers()), LIST.format("list", "Sequential")),
    "a_list_of_a_branch": (lambda: Residual(layers()), LIST.format("list", "Residual")),
    "a_generator": (lambda: Sequential(m for m in layers()), LIST.format("<genexpr>", "Sequential")),
    "a_list_put_in": (lambda: model().insert(0, layers()), LIST.format("list", "Sequential")),  # type: ignore[arg-type]
    "a_dict": (lambda: Sequential({"a": ops.GELU()}), r"write Sequential\(collections.OrderedDict\(layers\)\)"),
    "none": (lambda: Sequential(ops.GELU(), None), r"got None as '1': leave it out, or put ops\.Identity\(\) there"),
    "none_by_name": (
        lambda: Residual(OrderedDict(act=None)),
        "^Residual takes modules, got None as 'act': leave it out",
    ),
    "none_behind": (lambda: model().append(None), "^Sequential takes modules, got None as '2'"),  # type: ignore[arg-type]
    "module_dict": (lambda: Sequential(nn.ModuleDict({"a": ops.GELU()})), "OrderedDict"),
    "a_class": (lambda: Sequential(ops.GELU), r"got GELU: a class is no module yet: write GELU\(\)"),
    "a_class_of_torch": (lambda: model().append(nn.Tanh), r"write Tanh\(\)"),  # type: ignore[arg-type]
    "a_class_at_a_place": (lambda: model().__setitem__(1, ops.SiLU), r"write SiLU\(\)"),  # type: ignore[arg-type]
    "a_function": (lambda: Sequential(torch.relu), "got relu: take ops.ReLU"),
    "a_function_of_two_words": (lambda: Sequential(nn.functional.log_softmax), "take ops.LogSoftmax"),
    "a_function_that_is_no_op": (lambda: Sequential(torch.sin), "torch.nn.Module whose forward calls it"),
    "a_lambda": (lambda: Sequential(lambda x: x), "torch.nn.Module whose forward calls it"),
    "a_word": (lambda: Sequential("gelu"), "got str: give it ops of te_fuser.ops or any torch.nn.Module"),
    "numpy": (lambda: model()(np.ones((2, 8))), r"takes a torch.Tensor, got ndarray: give torch\.from_numpy\(x\)$"),
    "numpy_of_an_op": (lambda: ops.GELU()(np.ones((2, 8))), r"torch\.from_numpy\(x\)$"),  # type: ignore[arg-type]
    "numpy_of_a_preset": (lambda: preset()(np.ones((2, 8))), r"torch\.from_numpy\(x\)$"),
    "numpy_to_plan": (lambda: model().plan(np.ones((2, 8))), r"torch\.from_numpy\(x\)$"),  # type: ignore[arg-type]
    "numpy_to_verify": (lambda: te_fuser.verify(model(), np.ones(8)), r"torch\.from_numpy\(x\)$"),  # type: ignore[arg-type]
    "numpy_by_name": (
        lambda: Sequential(ops.Add("c"))(torch.ones(8), c=np.ones(8)),
        r"^input 'c' takes a torch.Tensor, got ndarray: give torch\.from_numpy\(x\)$",
    ),
    "script": (scripted(model()), "^torch.jit.script reads .* torch.compile, or .* model.reference.*works-with.md"),
    "script_of_an_op": (scripted(ops.GELU()), "^torch.jit.script reads Python that a GELU does not have"),
    "script_of_a_preset": (scripted(preset()), "^torch.jit.script reads"),
    "script_around": (scripted(nn.Sequential(nn.Linear(8, 8), model())), "^torch.jit.script reads"),
    "by_position": (
        lambda: ops.LayerNorm(64, 1e-5, True),  # type: ignore[misc]
        r"^LayerNorm\(\) takes 2 arguments by position, got 3: write elementwise_affine=True\n"
        r"  LayerNorm\(features, eps=1e-05, \*, .*bias=True",
    ),
    "by_position_of_a_list": (
        lambda: te_fuser.LayerNorm(64, 1e-5, True, 3),
        "by position, got True behind them: give it",
    ),
    "by_position_without_any": (lambda: ops.ReLU(True), r"0 arguments by position, got 1: name the others, or leave"),
    "misspelt": (
        lambda: ops.Linear(8, 8, biass=True),  # type: ignore[call-arg]
        r"^Linear\(\) takes no argument 'biass'; did you mean 'bias'\?\n  Linear\(in_features, out_features",
    ),
    "misspelt_of_a_list": (lambda: Sequential(ops.GELU(), memry="lean"), r"did you mean 'memory'\?"),  # type: ignore[call-arg]
    "misspelt_of_a_preset": (lambda: te_fuser.Linear(8, 8, biass=True), r"^Linear\(\) .*'biass'; did you mean 'bias'"),
    "word_of_torch": (lambda: ops.DotProductAttention(num_heads=2, head_dim=4), "'num_heads'; here that is heads"),  # type: ignore[call-arg]
    "causal": (lambda: ops.DotProductAttention(2, 4, is_causal=True), "'is_causal'; here that is mask=\"causal\""),  # type: ignore[call-arg]
    "word_of_torch_to_a_preset": (
        lambda: te_fuser.TransformerLayer(8, 8, 2, batch_first=True),
        "'batch_first'; here that is attn_input_format=\"bshd\"",
    ),
    "nothing_to_say": (lambda: ops.ReLU(inplace=True), "'inplace'; leave it out"),
    "missing": (lambda: ops.Linear(8), r"^Linear\(\) cannot be made: missing .*'out_features'\n  Linear\("),  # type: ignore[call-arg]
}


test_mistakes = refusals({name: (call, TypeError, words) for name, (call, words) in WORDS.items()})


def test_what_is_none_of_them() -> None:
    x = torch.randn(2, 8)
    assert Sequential(OrderedDict(a=ops.GELU()))(x).shape == x.shape

    class Looped(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for module in self:
                x = module(x)
            return x

    torch.testing.assert_close(Sequential(Looped(layers()))(x), Looped(layers())(x))
    assert Sequential(torch.jit.script(nn.Linear(8, 8)), ops.GELU())(x).shape == x.shape
    later = nn.Module()
    later.forward = torch.sin
    torch.testing.assert_close(Sequential(later)(x), x.sin())
    made, x = Sequential(*layers(), ops.ReLU()), torch.randn(2, 8)
    made._modules["1"] = None
    torch.testing.assert_close(made[:](x), made(x))


# Arguments that nothing can be made of -> the call, the error, what its message says.
ARGUMENTS: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "eps_below_0": (lambda: ops.LayerNorm(8, eps=-1), ValueError, [r"^LayerNorm: eps is a small number", "got -1"]),
    "eps_nan": (lambda: ops.RMSNorm(8, eps=NAN), ValueError, [r"^RMSNorm: eps", "got nan"]),
    "eps_none": (lambda: ops.RMSNorm(8, eps=None), TypeError, ["^RMSNorm takes a number as eps, got None"]),
    "eps_text": (lambda: ops.L2Norm("a"), TypeError, ["^L2Norm takes a number as eps, got 'a'"]),
    "eps_of_heads": (lambda: ops.HeadNorm(4, heads=2, eps=INF), ValueError, [r"^HeadNorm: eps", "got inf"]),
    "eps_adaptive": (lambda: ops.AdaptiveLayerNorm(8, -1.0, per="row"), ValueError, [r"^AdaptiveLayerNorm: eps"]),
    "scale_by_text": (lambda: ops.Scale(value="a"), TypeError, ["^Scale takes a number as value, got 'a'"]),
    "flatten_text": (lambda: ops.Flatten("a"), TypeError, ["^Flatten takes a whole number as start_dim, got 'a'"]),
    "unflatten_text": (lambda: ops.Unflatten("a", (2, 2)), TypeError, ["^Unflatten takes a whole number as dim"]),
    "half_a_size": (lambda: ops.Unflatten(1, (1.5, 2)), TypeError,
     ["^Unflatten takes a whole number as each size, got 1"]),
    "no_size": (lambda: ops.Reshape(None), TypeError, ["^Reshape takes a whole number as each size, got None"]),
    "softmax_elsewhere": (lambda: ops.Softmax(dim=1), ValueError,
     [r"^Softmax goes over the features of each row, dim=-1, got dim=1: put torch\.nn\.Softmax\(1\) into the list"]),
    "verify_text": (lambda: te_fuser.verify(ops.GELU(), "x"), TypeError,
     [r"^verify\(model, x\) takes a torch.Tensor, got str$"]),
    "verify_dtype_names": (lambda: te_fuser.verify(ops.GELU(), dtypes=["float32"]), TypeError,
     [r"^dtypes are a list of PyTorch's, verify\(model, dtypes=\[torch\.float32\]\), got \['float32'\]"]),
    "verify_one_dtype": (lambda: te_fuser.verify(ops.GELU(), dtypes=torch.float32), TypeError, ["^dtypes are a list"]),
    "reference_text": (lambda: te_fuser.Sequential(ops.GELU()).reference("a"), TypeError,
     ["^te_fuser takes a torch.Tensor, got str"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    call, error, words = ARGUMENTS[name]
    refused(error, words, call)


def test_arguments_that_are_numbers() -> None:
    """Arguments may be numpy's numbers, whole ones, and what torch.nn takes."""
    assert ops.Reshape(np.int64(2), -1).shape == (2, -1) and ops.LayerNorm(8, eps=0).eps == 0.0
    assert ops.Scale(value=np.float32(0.5)).value == 0.5
    assert_as_meant(sequential(ops.Softmax(dim=-1), ops.LogSoftmax(-1)), tensor(5, 8))


@pytest.mark.parametrize("kind", [ops.Linear, ops.ReLU, ops.LayerNorm, Sequential, te_fuser.TransformerLayer])
def test_signatures_are_those_of_constructors(kind: type) -> None:
    """Whoever looks for `device`, as torch.nn.utils.skip_init does, finds what the class takes."""
    assert "given" not in inspect.signature(kind).parameters
    taken = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    assert {*inspect.signature(kind).parameters} >= {*taken} - {"self", "keywords"}


def test_copies_are_made_without_arguments() -> None:
    for module in (ops.Linear(8, 4), Sequential(ops.Linear(8, 4)), preset()):
        for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            x = torch.randn(2, 8)
            torch.testing.assert_close(made(x), module(x))
    assert nn.utils.skip_init(ops.Linear, 8, 4).weight.shape == (4, 8)  # type: ignore[arg-type]
