"""Parameters have torch.nn's names, shapes and starting values, on every device and in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from te_fuser import ops
from te_fuser.ops.base import FusableOperation

TWINS: dict[str, tuple[Callable[..., FusableOperation], Callable[..., torch.nn.Module]]] = {
    "linear": (lambda **k: ops.Linear(6, 4, **k), lambda **k: torch.nn.Linear(6, 4, **k)),
    "linear_no_bias": (lambda **k: ops.Linear(6, 4, False, **k), lambda **k: torch.nn.Linear(6, 4, False, **k)),
    "matmul": (lambda **k: ops.MatMul(6, 4, **k), lambda **k: torch.nn.Linear(6, 4, False, **k)),
    "layer_norm": (lambda **k: ops.LayerNorm(6, **k), lambda **k: torch.nn.LayerNorm(6, **k)),
    "layer_norm_tuple": (lambda **k: ops.LayerNorm((6,), **k), lambda **k: torch.nn.LayerNorm((6,), **k)),
    "layer_norm_no_bias": (
        lambda **k: ops.LayerNorm(6, bias=False, **k),
        lambda **k: torch.nn.LayerNorm(6, bias=False, **k),
    ),
    "rms_norm": (lambda **k: ops.RMSNorm([6], **k), lambda **k: torch.nn.RMSNorm([6], **k)),
}


@pytest.mark.parametrize("name", TWINS)
def test_state_dicts_are_exchangeable(name: str) -> None:
    ours, torchs = (make() for make in TWINS[name])
    torch.nn.init.normal_(next(torchs.parameters()))
    assert list(ours.state_dict()) == list(torchs.state_dict())
    ours.load_state_dict(torchs.state_dict(), strict=True)
    for key, tensor in torchs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], tensor)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in torchs.named_parameters()]


@pytest.mark.parametrize("name", TWINS)
def test_starting_values_are_torchs(name: str) -> None:
    """With one seed, and the generator is left in the same state."""
    made, behind = [], []
    for make in TWINS[name]:
        torch.manual_seed(3)
        made.append(make(dtype=torch.float64))
        behind.append(torch.rand(1))
    assert torch.equal(*behind)
    for ours, torchs in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert ours.dtype == torch.float64 and torch.equal(ours, torchs)


MAKERS: dict[str, Callable[..., FusableOperation]] = {
    **{name: ours for name, (ours, _) in TWINS.items()},
    "bias": lambda **k: ops.Bias(6, **k),
    "scale": lambda **k: ops.Scale(6, 0.5, **k),
    "scale_scalar": lambda **k: ops.Scale((), 0.5, **k),
    "layer_norm_zero_centered": lambda **k: ops.LayerNorm(6, zero_centered_gamma=True, **k),
    "rms_norm_zero_centered": lambda **k: ops.RMSNorm(6, zero_centered_gamma=True, **k),
}


@pytest.mark.parametrize("name", MAKERS)
def test_meta_device_then_reset_is_making_it_here(name: str) -> None:
    op = MAKERS[name](device="meta", dtype=torch.float32)
    assert all(p.is_meta for p in op.parameters())
    with torch.device("meta"):
        assert all(p.is_meta for p in MAKERS[name]().parameters())
    op.to_empty(device="cpu")
    torch.manual_seed(4)
    op.reset_parameters()  # type: ignore[operator]
    torch.manual_seed(4)
    for p, q in zip(op.parameters(), MAKERS[name]().parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", MAKERS)
def test_default_dtype_is_torchs(name: str) -> None:
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert all(p.dtype == torch.bfloat16 for p in MAKERS[name]().parameters())
    finally:
        torch.set_default_dtype(before)


def test_zero_centered_weights_start_at_zero() -> None:
    for kind in (ops.LayerNorm, ops.RMSNorm):
        assert (kind(4, zero_centered_gamma=True).weight == 0).all()  # type: ignore[union-attr]


def test_an_op_that_cannot_be_made_like_itself() -> None:
    class Own(ops.RMSNorm):
        def __init__(self, features: tuple[int, ...], own: int) -> None:
            super().__init__(features)

    with pytest.raises(NotImplementedError, match="Own keeps no attribute 'own' of its constructor's argument"):
        Own((2, 3), 1)(torch.zeros(5, 2, 3))


def test_repr_says_what_an_op_was_made_with() -> None:
    assert repr(ops.LayerNorm(6, eps=1e-3)) == "LayerNorm(features=6, eps=0.001, zero_centered_gamma=False)"
    assert repr(ops.Linear(6, 4)) == "Linear(in_features=6, out_features=4)"
    assert repr(ops.Fork("skip")) == "Fork(name=skip)" and repr(ops.Reshape(-1, 4)) == "Reshape(-1, 4)"


@pytest.mark.parametrize("name", MAKERS)
def test_a_dtype_that_is_none_of_torchs_floating_point_ones(name: str) -> None:
    for dtype, use in (("float32", r"torch\.float32$"), ("int64", "torch.bfloat16, say"), (torch.int64, ""), (3, "")):
        with pytest.raises(TypeError, match=f"dtype is a floating-point dtype of torch's, got {dtype!r}: use {use}"):
            MAKERS[name](dtype=dtype)
