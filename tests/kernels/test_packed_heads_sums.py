"""Sums of the kernel over packed heads, beside those of generated kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Fuser, fusions, ops
from te_fuser.kernels import packed_heads
from te_fuser.verify import VerificationError
from tests.fake_cuda import Emulation, FakeDriver
from tests.kernels.emulated import launched
from tests.kernels.packed_cases import ATTENTION
from tests.needs import needs_compiler
from tests.twins import randomize

pytestmark = needs_compiler
HEADS, DIM = 2, 16
WIDTH, FEATURES = HEADS * DIM, 3 * HEADS * DIM
POSITIONS, SAMPLES = 60, 3


@pytest.fixture(autouse=True)
def plans(driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans run emulated kernels, those over packed heads included."""
    monkeypatch.setattr("te_fuser.fusions.rotary.why_no_kernel", lambda m: None)
    with emulation.in_plans():
        yield


def only() -> Any:
    return fusions.only("stretch", "rotary_embedding_forward", "rotary_embedding_backward", ATTENTION)


def rotary() -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(DIM, heads=HEADS)


def attention() -> ops.DotProductAttention:
    return ops.DotProductAttention(HEADS, DIM, mask="causal", layout="sequence_first")


# Ops behind a norm and a product, and the fusion that makes the bias's gradient.
LISTS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "bias and attention": (lambda: [ops.Bias(FEATURES), attention()], ATTENTION.name),
    "bias, rotation and attention": (lambda: [ops.Bias(FEATURES), rotary(), attention()], ATTENTION.name),
    "bias and rotation": (lambda: [ops.Bias(FEATURES), rotary()], "rotary_embedding_backward"),
}


def layer(name: str, **options: Any) -> te_fuser.Sequential:
    parts = [ops.LayerNorm(WIDTH), ops.MatMul(WIDTH, FEATURES), *LISTS[name][0]()]
    return randomize(te_fuser.Sequential(*parts, **options)).float()


def source() -> torch.Tensor:
    return torch.randn(POSITIONS, SAMPLES, WIDTH, requires_grad=True)


def gradients(model: te_fuser.Sequential, x: torch.Tensor, reference: bool = False) -> list[torch.Tensor]:
    y = model.reference(x) if reference else model(x)
    dy = torch.linspace(-1, 1, y.numel()).to(y.dtype).view(y.shape)
    return [*torch.autograd.grad(y, [x, *model.parameters()], dy)]


def assert_exact(found: list[torch.Tensor], model: te_fuser.Sequential, x: torch.Tensor) -> None:
    exact = gradients(model.double(), x.detach().double().requires_grad_(), reference=True)
    model.float()
    for got, want in zip(found, exact, strict=True):
        # Sums of both signs: PyTorch errs as much in float32.
        assert (got.double() - want).abs().max() <= 5e-5 * want.abs().max()


@pytest.mark.parametrize("name", LISTS)
def test_sums_of_two_kernels(name: str, driver: FakeDriver) -> None:
    """The norm's kernel has sums, and that over packed heads, which each adds up by a launch of its own."""
    model, x = layer(name), source()
    with only():
        (step,) = (s for s in model.plan(x).backward if s.name == LISTS[name][1])
        assert [k for k, _ in step.outputs] == ["input", "0.bias"]
        found, _, last = launched(driver, gradients, model, x)
    assert last.endswith(b"_finish")
    assert_exact(found, model, x)


def test_where_no_generated_kernel_has_sums(driver: FakeDriver) -> None:
    model, x = randomize(te_fuser.Sequential(ops.Bias(FEATURES), attention())).float(), torch.randn(40, 2, FEATURES)
    x.requires_grad_()
    with only():
        found, launches, last = launched(driver, gradients, model, x)
    # The bias in forward; the packing and its sums in backward.
    assert (launches, last) == (3, b"packed_heads_finish")
    assert_exact(found, model, x)


def test_sums_that_a_step_reads(driver: FakeDriver) -> None:
    """The gradient of a bias in two places is the sum of two, which is made within the program."""
    shared = ops.Bias(FEATURES)
    model = te_fuser.Sequential(shared, attention(), ops.MatMul(WIDTH, FEATURES), shared, attention())
    x = torch.randn(POSITIONS, SAMPLES, FEATURES, requires_grad=True)
    randomize(model).float()
    with only():
        found, _, last = launched(driver, gradients, model, x)
    assert last == b"packed_heads_finish"
    assert_exact(found, model, x)


def test_verify_sees_wrong_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    pack = packed_heads.Packing.__call__

    def wrong(*arguments: Any, **options: Any) -> Any:
        dx, sums = pack(*arguments, **options)
        return dx, 2 * sums

    model, x = layer("bias and attention", verify=True), source()
    with only():
        assert_exact(gradients(model, x), model, x)
        monkeypatch.setattr(packed_heads.Packing, "__call__", wrong)
        with pytest.raises(VerificationError, match="gradient of bias"):
            gradients(model, x)


def test_one_block_that_has_it_all_needs_no_second_launch(driver: FakeDriver) -> None:
    model, x = Fuser([ops.Bias(FEATURES), attention()]), torch.randn(2, 1, FEATURES, requires_grad=True)
    with only():
        model(x).sum().backward()
    assert driver.last_symbol == b"packed_heads"
