"""Weights in 8 bits: by PyTorch, by the kernel run on the CPU; and compiled for the GPUs there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import nvrtc
from te_fuser.kernels import quantize_weights
from te_fuser.kernels.quantize_weights import QuantizeWeight, QuantizeWeights, WeightQuantizer
from te_fuser.quantization import quantize
from tests.codegen import ptx
from tests.fake_cuda import FakeDriver, compile_driver, emulate, in_place, in_place_of_written
from tests.float8 import E4M3, codes, every_number, telling_numbers
from tests.kernels.weights8 import DTYPES, run_weights, weights_like, weights_wrongly
from tests.needs import needs_compiler, needs_nvrtc

ALONE = [QuantizeWeight(dtype, wanted, wanted != "turned") for dtype in DTYPES for wanted in ("rows", "turned", "both")]
KERNELS = [QuantizeWeights(), *ALONE]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    """The kernels run by a driver that executes them on the CPU."""
    folder = tmp_path_factory.mktemp("weights")
    native = emulate(KERNELS, folder)
    with in_place_of_written(native.__getitem__), in_place(compile_driver(folder)) as driver:
        yield driver


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES])
def test_by_torch(dtypes: tuple[torch.dtype, ...]) -> None:
    assert not run_weights(weights_like(dtypes))


@needs_compiler
@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in DTYPES), DTYPES])
def test_by_the_kernel(dtypes: tuple[torch.dtype, ...], emulated: FakeDriver) -> None:
    """In one launch, parameters too."""
    weights = [torch.nn.Parameter(w) for w in weights_like(dtypes)]
    emulated.launches = 0
    assert not run_weights(weights, "by_kernel")
    assert emulated.launches == 1


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number(dtype: torch.dtype, emulated: FakeDriver) -> None:
    """The bytes of `quantize`, of infinities and NaN too; NaN is the largest magnitude."""
    x = (telling_numbers(E4M3)[: 2**16] if dtype == torch.float32 else every_number(dtype)).reshape(-1, 64)
    usual = x.clone().nan_to_num(0.0, posinf=3.0, neginf=-3.0)
    scales, before = torch.tensor([3.1, 0.02]), torch.zeros(2)
    amaxes = before.clone()
    quantizer = WeightQuantizer((0, 1))
    assert not weights_wrongly(
        [x, usual], (0, 1), scales, quantizer.by_kernel([x, usual], scales, amaxes), before, amaxes
    )
    assert amaxes[0].isnan() and amaxes[1].isfinite()


@needs_compiler
def test_where_weights_lie_is_told_once(emulated: FakeDriver) -> None:
    """Other values at the same place, other scales, no amaxes; then another place."""
    weights, quantizer = weights_like((torch.bfloat16,)), WeightQuantizer(range(7))
    scales = torch.full((7,), 2.0)
    quantizer.by_kernel(weights, scales, None)
    told = quantizer._table
    weights[0].mul_(0.5)
    again = quantizer.by_kernel(weights, 3.0 * scales, None)
    assert quantizer._table is told
    assert not weights_wrongly(
        weights, range(7), 3.0 * scales, again, torch.zeros(7), torch.stack([w.abs().amax().float() for w in weights])
    )
    moved = [weights[0].clone(), *weights[1:]]
    once_more = quantizer.by_kernel(moved, 3.0 * scales, None)
    assert quantizer._table is not told
    for ours, others in zip(again, once_more, strict=True):
        assert all(torch.equal(codes(a), codes(b)) for a, b in zip(ours, others, strict=True))


@needs_compiler
def test_what_lies_otherwise_is_copied(emulated: FakeDriver) -> None:
    apart = torch.randn(32, 64)[:, 16:]
    shifted = torch.randn(32 * 48 + 1)[1:].view(32, 48)
    assert not run_weights([apart, shifted, torch.randn(48, 32).mT], "by_kernel")


@needs_compiler
def test_weights_of_nothing(emulated: FakeDriver) -> None:
    emulated.launches = 0
    amaxes = torch.zeros(1)
    for way in ("by_kernel", "__call__"):
        ((rows, turned),) = getattr(WeightQuantizer((0,)), way)([torch.zeros(0, 32)], torch.ones(1), amaxes)
        assert rows.shape == (0, 32) and turned.shape == (32, 0) and amaxes == 0
    assert emulated.launches == 0 and WeightQuantizer(())([], torch.ones(1)) == []


W, ONE = torch.zeros(16, 32), torch.ones(1)
REFUSED = {
    "sizes": ([torch.zeros(16, 40)], ONE, None, ValueError, r"in multiples of 16, got \[16, 40\]"),
    "one dimension": ([torch.zeros(16)], ONE, None, ValueError, r"\[out, in\]"),
    "float64": ([W.double()], ONE, None, TypeError, "float32, bfloat16, float16, got float64"),
    "count": ([W, W], ONE, None, ValueError, "1 places of scales for 2 weights"),
    "scales": ([W], ONE.double(), None, ValueError, r"scales are float32 \[S\], side by side, got float64 \[1\]"),
    "places": ([W], torch.ones(0), None, ValueError, "there are 0 scales, and places up to 0"),
    "amaxes": ([W], ONE, torch.ones(()), ValueError, "amaxes are float32"),
    "device": ([W.to("meta")], ONE, None, ValueError, "a weight is on meta, its scale on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    weights, scales, amaxes, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words):
        WeightQuantizer((0,))(weights, scales, amaxes)


@needs_compiler
@pytest.mark.parametrize("kernel", ALONE, ids=lambda k: f"{str(k.dtype)[6:]}-{k.wanted}")
def test_one_alone(kernel: QuantizeWeight, emulated: FakeDriver) -> None:
    """In one launch; what nobody wants is not made."""
    for w in weights_like((kernel.dtype,)):
        scale, slot = torch.tensor(31.0), torch.tensor(1e-3) if kernel.records else None
        emulated.launches = 0
        found = quantize_weights.quantize_weight_by_kernel(w, scale, slot, kernel.wanted)
        assert emulated.launches == 1
        exact = quantize(w, E4M3, scale)
        if slot is not None:
            assert slot == max(exact.amax.item(), torch.tensor(1e-3).item())
        for which, ours, wanted in zip(("rows", "turned"), found, (exact.data, exact.transposed), strict=True):
            if kernel.wanted in (which, "both"):
                assert torch.equal(codes(ours), codes(wanted)) and ours.shape == wanted.shape
            else:
                assert not ours.numel()


def test_one_alone_by_torch() -> None:
    slot = torch.zeros(1)
    rows, turned = quantize_weights.quantize_weight(W + 2.0, torch.tensor(3.0), slot)
    assert (rows.float() == 6.0).all() and turned.shape == (32, 16) and slot == 2.0
    with pytest.raises(ValueError, match="scale is one number in float32, got float64"):
        quantize_weights.quantize_weight(W, torch.ones((), dtype=torch.float64))
    with pytest.raises(ValueError, match='"rows", "turned" or "both" are wanted'):
        QuantizeWeight(torch.float32, "columns")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_compiles(arch: str, tmp_path: Path) -> None:
    for kernel in KERNELS:
        compiled = nvrtc.compile_source(kernel.text(), arch, name=kernel.name, cache=tmp_path)
        assert {r.symbol for r in compiled.resources} == {kernel.name}
        assert all(r.spilled_bytes == 0 and r.stack_bytes == 0 for r in compiled.resources), (kernel, compiled)


@needs_nvrtc
def test_they_wait_before_they_touch_memory() -> None:
    for kernel in (QuantizeWeights(), QuantizeWeight(torch.bfloat16, records=True)):
        assert not ptx.too_early(kernel.text(), "sm_90a")
