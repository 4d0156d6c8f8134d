"""A newcomer's mistakes: each error says the line to write."""

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
from tests.refused import raises, refused
from tests.twins import assert_as_meant, sequential, tensor

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


@pytest.mark.parametrize("name", WORDS)
def test_mistakes(name: str) -> None:
    call, words = WORDS[name]
    raises(TypeError, words, call)


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
