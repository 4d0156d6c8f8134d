"""A preset written by a user: names of its own for parameters, a forward of its own, and no border for fusions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import ops
from tests.twins import assert_same_gradients, randomize, results_and_gradients, tensor


class LayerNormMLP(te_fuser.Sequential):
    """y = W2 gelu(W1 norm(x) + b1) + b2, under the names that checkpoints of other libraries have.

    Args:
        hidden: features of x and y.
        ffn: features between the two products.
    """

    flattens = True

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__(
            self._bound(ops.LayerNorm(hidden, device="meta"), weight="layer_norm_weight", bias="layer_norm_bias"),
            ops.Output("layer_norm_output"),
            self._bound(ops.MatMul(hidden, ffn, device="meta"), weight="fc1_weight"),
            self._bound(ops.Bias(ffn, device="meta"), bias="fc1_bias"),
            ops.GELU(),
            self._bound(ops.MatMul(ffn, hidden, device="meta"), weight="fc2_weight"),
            self._bound(ops.Bias(hidden, device="meta"), bias="fc2_bias"),
        )
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(hidden))
        self.layer_norm_bias = torch.nn.Parameter(torch.zeros(hidden))
        self.fc1_weight = torch.nn.Parameter(torch.randn(ffn, hidden) * hidden**-0.5)
        self.fc1_bias = torch.nn.Parameter(torch.zeros(ffn))
        self.fc2_weight = torch.nn.Parameter(torch.randn(hidden, ffn) * ffn**-0.5)
        self.fc2_bias = torch.nn.Parameter(torch.zeros(hidden))

    def _bound(self, op: ops.FusableOperation, **names: str) -> ops.Bound:
        return ops.Bound(op, self, **names)

    def forward(self, x: torch.Tensor, return_layer_norm_output: bool = False) -> Any:  # type: ignore[override]
        """y, or (y, what the norm gives)."""
        return super().forward(x, outputs=("layer_norm_output",) if return_layer_norm_output else ())


NAMES = ["layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"]
HIDDEN, FFN = 32, 64
X = tensor(3, 5, HIDDEN)


def around(middle: te_fuser.Sequential, **options: Any) -> te_fuser.Sequential:
    """A list in which something stands before and behind the preset that can be fused with it."""
    return te_fuser.Sequential(ops.Linear(HIDDEN, HIDDEN), ops.GELU(), middle, ops.Scale(HIDDEN), **options)


def bare() -> te_fuser.Sequential:
    """The ops of the preset, each with parameters of its own."""
    return te_fuser.Sequential(
        ops.LayerNorm(HIDDEN),
        ops.Output("layer_norm_output"),
        ops.MatMul(HIDDEN, FFN),
        ops.Bias(FFN),
        ops.GELU(),
        ops.MatMul(FFN, HIDDEN),
        ops.Bias(HIDDEN),
    )


def meaning(model: te_fuser.Sequential, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of `around(LayerNormMLP(...))`, in torch.nn's functions."""
    mlp = model[2]
    norm = F.layer_norm(
        F.gelu(F.linear(x, model[0].weight, model[0].bias), approximate="tanh"),
        (HIDDEN,),
        mlp.layer_norm_weight,
        mlp.layer_norm_bias,
    )
    between = F.gelu(F.linear(norm, mlp.fc1_weight, mlp.fc1_bias), approximate="tanh")
    return F.linear(between, mlp.fc2_weight, mlp.fc2_bias) * model[3].weight, norm


@pytest.mark.parametrize("device", ["h200", "b200", None])
@pytest.mark.parametrize("outputs", [(), ("layer_norm_output",)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_fused_as_the_bare_list_is(device: str | None, outputs: tuple[str, ...], dtype: torch.dtype) -> None:
    x = torch.empty(64, HIDDEN, dtype=dtype, requires_grad=True)
    ours, theirs = (around(middle).to(dtype) for middle in (LayerNormMLP(HIDDEN, FFN), bare()))
    mine, want = (m.explain(x, device=device, source=True, outputs=outputs, details=True) for m in (ours, theirs))
    assert str(mine) == str(want)
    plan = ours.plan(x, device=device, outputs=outputs)
    inside = [k for k, node in enumerate(plan.graph.nodes) if node.path.startswith("2.")]
    crossing = [
        s for s in (*plan.forward, *plan.backward) if s.start < inside[0] < s.stop or s.start <= inside[-1] < s.stop - 1
    ]
    assert {(s.start < inside[0], s.stop > inside[-1] + 1) for s in crossing} == {(True, False), (False, True)}


def test_values_and_all_gradients() -> None:
    model = randomize(around(LayerNormMLP(HIDDEN, FFN), kernels="reference").double())
    leaves = {"input": X, **dict(model.named_parameters())}
    assert [name for name in model.state_dict() if name.startswith("2.")] == [f"2.{name}" for name in NAMES]
    asked = ("layer_norm_output",)
    got, grads = results_and_gradients(model, leaves, X, asked)
    want, want_grads = results_and_gradients(lambda x, outputs: meaning(model, x), leaves, X, asked)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    assert_same_gradients(grads, want_grads)
    assert all(gradient is not None for gradient in grads.values()) and len(grads) == 10
    y, norm = model[2](X, return_layer_norm_output=True)
    torch.testing.assert_close(norm, F.layer_norm(X, (HIDDEN,), model[2].layer_norm_weight, model[2].layer_norm_bias))
    torch.testing.assert_close(model[2](X), y)


def test_user_preset_is_verified_in_a_list_and_alone() -> None:
    """Alone by its ops: its forward takes other arguments than a list's."""
    model = randomize(around(LayerNormMLP(HIDDEN, FFN)))
    for subject, x in ((model, X.detach().bfloat16()), (model[2], X.detach().float())):
        report = te_fuser.verify(subject, x, outputs=("layer_norm_output",), dtypes=(x.dtype,))
        assert report.passed and any("layer_norm_output" in row.tensor for row in report.rows)
