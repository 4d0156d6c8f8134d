"""The kernel over packed heads, run on the CPU by an emulated driver, and compiled for the GPUs there are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from te_fuser.kernels import packed_heads
from te_fuser.kernels.packed_heads import PackedPass, Packing
from te_fuser.ops.attention.heads import PackedHeads
from te_fuser.quantization import quantize
from tests.fake_cuda import FakeDriver
from tests.float8 import codes
from tests.kernels.emulated import emulating
from tests.kernels.packed_cases import CASES, EMPTY, SIZES, Case, complaints, parts_of
from tests.needs import needs_compiler

BY_NAME = {case.name: case for case in CASES}


emulated = emulating(lambda: (case.kernel for case in CASES))


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values(case: Case, emulated: FakeDriver) -> None:
    for seed, (samples, positions) in enumerate(SIZES):
        got = case.run(*case.inputs(samples, positions, seed))
        assert not complaints(case, samples, positions, got, seed), (samples, positions)


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing(case: Case, emulated: FakeDriver) -> None:
    for samples, positions in EMPTY:
        x, bias = case.inputs(samples, positions)
        y, sums = case.run(x, bias)
        assert y.shape == x.shape and (sums is None) == (case.sums is None)
        assert sums is None or (sums == 0).all()


@needs_compiler
@pytest.mark.parametrize("case", [c for c in CASES if c.stored], ids=lambda case: case.name)
def test_8_bits(case: Case, emulated: FakeDriver) -> None:
    """The bytes of what is not stored so; sums and the largest magnitude are of what is neither scaled nor rounded."""
    wide = replace(case, stored=None, dtype=torch.float32)
    for scale in (3.0, 1e4):
        scaled = case.scaled(torch.device("cpu"), scale)
        assert scaled is not None and case.stored is not None
        x, bias = case.inputs(3, 33)
        y, sums = case.run(x, bias, scaled)
        exact, total = wide.meant(x, bias, torch.float32)
        wanted = quantize(exact, case.stored, scale)
        assert y.dtype == case.stored and (codes(y) != codes(wanted.data)).float().mean() < 1e-3
        torch.testing.assert_close(scaled.amax, exact.abs().max(), rtol=1e-6, atol=0)
        if total is not None:
            assert sums is not None
            torch.testing.assert_close(sums.float(), total, rtol=2.0**-8, atol=2.0**-5)
        before = scaled.amax.clone()
        case.run(x / 2, bias, scaled)
        assert torch.equal(scaled.amax, before)


@needs_compiler
def test_strided_inputs(emulated: FakeDriver) -> None:
    case = BY_NAME["forward of one sample's positions"]
    x, bias = case.inputs(3, 10)
    assert bias is not None
    for strided in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat((x, x), -1)[..., : x.shape[-1]],
        torch.cat((x, x[..., :3]), -1)[..., : x.shape[-1]],
        torch.stack((x, x), -1)[..., 0],
    ):
        got = case.run(strided, torch.stack((bias, bias), -1)[:, 0])
        assert not strided.is_contiguous() and not complaints(case, 3, 10, got, 0)
    one = x[:1, :1].expand(x.shape)
    y, _ = case.run(one, bias)
    torch.testing.assert_close(y, case.run(one.contiguous(), bias)[0], rtol=0, atol=0)


@needs_compiler
def test_one_launch_and_one_for_sums(emulated: FakeDriver) -> None:
    """None for the sums where one block has all rows of a column, as with so many columns on so small a GPU."""
    for name, launches in (("forward", 1), ("backward with sums", 1), ("packed and turned", 2), ("packed", 1)):
        emulated.launches = emulated.copies = 0
        BY_NAME[name].run(*BY_NAME[name].inputs(2, 40))
        assert emulated.launches == launches and emulated.copies == 0


@needs_compiler
def test_a_gradient_of_the_kernels_own_order_is_read_where_it_lies(emulated: FakeDriver) -> None:
    """Also heads and samples at one stride, as attention's kernels return them."""
    case = BY_NAME["packed and turned"]
    dim = case.heads.head_dim
    whole = [torch.randn(9, 2 * n, dim).to(case.dtype).permute(1, 0, 2) for n in (8, 2, 2)]  # [B * heads, S, D]
    q, k, v = (part.unflatten(0, (2, 2, -1)) for part in whole)
    parts = (q, k[:, :, 0], v[:, :, 0])
    x = case.heads.pack(*parts, case.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", lambda self: pytest.fail("a copy"))
        y, sums = Packing(case.heads, case.rotation)(parts, sums=case.sums)
    want, total = case.meant(x, None)
    assert sums is not None and total is not None
    torch.testing.assert_close(y.double(), want, rtol=2.0**-8, atol=2.0**-8)
    torch.testing.assert_close(sums.double(), total, rtol=2.0**-8, atol=2.0**-6)


@needs_compiler
def test_one_packing_of_parts_that_lie_in_many_ways(emulated: FakeDriver) -> None:
    """Sizes and strides that it remembers do not change results: they equal those of a new Packing."""
    case = BY_NAME["packed and turned"]
    packing = Packing(case.heads, case.rotation)
    orders = ((3, 0, 1, 2, 4), (0, 1, 2, 3, 4), (0, 3, 1, 2, 4), (4, 3, 2, 1, 0))  # the last has to be copied
    for seed, (samples, positions, order) in enumerate(itertools.product((2, 3), (7, 33), orders * 2)):
        parts = parts_of(replace(case, order=order), case.inputs(samples, positions, seed)[0])
        found = packing(parts, sums=case.sums)
        want = Packing(case.heads, case.rotation)(parts, sums=case.sums)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert len(packing._known) == 2 * 2 * 3


def test_widths_and_lanes() -> None:
    def made(dim: int, **options: object) -> PackedPass:
        return PackedPass(PackedHeads(4, 2, dim), **{"dtype": torch.bfloat16, **options})  # type: ignore[arg-type]

    for p, vector, partner, lanes in (
        (made(128), 8, "kInside", 128), (made(128, rotary_dim=128), 8, "kSecond", 64),
        (made(128, rotary_dim=64), 8, "kLane", 128), (made(64, rotary_dim=64), 8, "kLane", 64),
        (made(128, dtype=torch.float32), 4, "kInside", 256), (made(8), 8, "kInside", 8),
        (made(8, rotary_dim=8), 4, "kSecond", 8), (made(24, rotary_dim=16), 8, "kSecond", 16),
        (made(5), 1, "kInside", 40), (made(24, rotary_dim=12, style="interleaved"), 4, "kInside", 48),
        (made(5, rotary_dim=4, style="interleaved"), 1, "kSecond", 24),
    ):  # fmt: skip
        assert (p.vector, p.partner, p.lanes) == (vector, partner, lanes), p
        assert p.tiles * p.threads >= p.lanes > (p.tiles - 1) * p.threads and p.threads % 32 == 0


@needs_compiler
def test_too_many_rows(monkeypatch: pytest.MonkeyPatch, emulated: FakeDriver) -> None:
    monkeypatch.setattr(packed_heads, "MOST_ROWS", 5)
    for name in ("forward", "packed"):
        with pytest.raises(ValueError, match="3 samples of 2 positions are more than 5 rows: split the batch"):
            BY_NAME[name].run(*BY_NAME[name].inputs(3, 2))
