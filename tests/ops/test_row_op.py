"""Formulas that cannot be planned: an error that names the op and says what to write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.formula import clamp, row_sum, split
from tests.refused import refused
from tests.twins import tensor

X = tensor(5, 8)


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
    x = X.detach()
    refused(error, words, lambda: model(x))


class Forgetful(ops.RowOp):
    def __init__(self):
        self.factor = 2.0

    def compute(self, x):
        return self.factor * x


@pytest.mark.parametrize("use", [lambda op: op(X), lambda op: te_fuser.Sequential(op)(X), repr])
def test_an_op_whose_constructor_does_not_call_that_of_its_base(use):
    with pytest.raises(AttributeError, match=r"^Forgetful: its __init__ must first call super\(\)\.__init__\(\)$"):
        use(Forgetful())
