"""The kernels over packed heads, run on the CPU by an emulated driver, with those that store both layouts of 8 bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from te_fuser.codegen.cuda_source_kernel import TextKernel
from te_fuser.kernels import packed_heads, quantizers
from te_fuser.kernels.packed_heads import PackedPass, Packing, Parts
from te_fuser.kernels.packed_tiles import TilePacking, why_not
from te_fuser.kernels.quantizers import transpose_by_torch
from te_fuser.ops.attention.heads import PackedHeads
from te_fuser.ops.blockwise_scaling import quantized
from te_fuser.quantization import quantize
from tests.fake_cuda import FakeDriver
from tests.float8 import BLOCKS, E4M3, codes
from tests.kernels.emulated import emulating
from tests.kernels.packed_cases import CASES, EMPTY, IN_BLOCKS, SIZES, TILES, Case, check_bytes, complaints, parts_of
from tests.needs import needs_compiler

BY_NAME = {case.name: case for case in CASES}


def every_kernel() -> Iterator[TextKernel[Any]]:
    """Kernels of all cases, and of those in tiles."""
    yield from (case.kernel for case in (*CASES, *TILES))
    yield from (case.tiles for case in TILES)
    yield from (case.tiles_in_blocks for case in IN_BLOCKS)


emulated = emulating(every_kernel)


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


@needs_compiler
@pytest.mark.parametrize("case", TILES, ids=lambda case: case.name)
def test_tiles_have_the_bytes_of_what_packs_rows_alone(case: Case, emulated: FakeDriver) -> None:
    packing = TilePacking(case.heads)
    for seed, sizes in enumerate((*SIZES, (2, 200), (0, 4), (3, 0))):
        check_bytes(case, packing, *sizes, seed, "cpu")


@needs_compiler
@pytest.mark.parametrize("case", IN_BLOCKS, ids=lambda case: case.name)
def test_tiles_in_blocks(case: Case, emulated: FakeDriver) -> None:
    """Outputs of the kernel that packs equal those of `quantized`, by rows and by columns."""
    packing, features = TilePacking(case.heads), case.heads.features
    for seed, (samples, positions) in enumerate(((2, 66), (3, 43), (0, 4))):
        x = case.inputs(samples, positions, seed)[0]
        parts = parts_of(case, x)
        rows, turned, sums = packing(parts, E4M3, sums=case.sums)
        whole = x.reshape(-1, features)
        for made, given in (
            (quantizers.unpacked(rows, features), whole),
            (quantizers.unpacked(turned, len(whole), turned=True), whole.mT),
        ):
            data, inverse = quantized(given, E4M3, BLOCKS)
            found = made[0].flatten(0, -2)
            assert torch.equal(codes(found)[:, : given.shape[1]], codes(data))
            assert not codes(found)[:, given.shape[1] :].any() and torch.equal(made[1], inverse.mT)
        if sums is not None:
            exact = whole.double().sum(0)
            torch.testing.assert_close(sums.double(), exact, rtol=0.02, atol=0.02 * (1 + len(whole)) ** 0.5)


@needs_compiler
def test_amax_is_raised_and_never_lowered(emulated: FakeDriver) -> None:
    case = TILES[0]
    scaled = case.scaled(torch.device("cpu"))
    assert scaled is not None
    for factor in (1.0, 0.5, 2.0):
        x = case.inputs(3, 33)[0]
        TilePacking(case.heads)(parts_of(case, factor * x), scaled, sums=case.sums)
        torch.testing.assert_close(scaled.amax, max(factor, 1.0) * x.float().abs().max())


@needs_compiler
def test_parts_that_cannot_be_read_as_they_lie_are_copied(emulated: FakeDriver) -> None:
    case = TILES[0]
    q, k, v = parts_of(case, case.inputs(2, 7)[0])
    strange: Parts = (torch.stack((q, q), -1)[..., 0], torch.stack((k, k), -1)[..., 0], v)
    scaled = case.scaled(torch.device("cpu"))
    assert scaled is not None
    packing = TilePacking(case.heads)
    for parts in ((q, k, v), strange, strange):
        rows, turned, _ = packing(parts, scaled, sums=case.sums)
        assert torch.equal(codes(rows), codes(packing((q, k, v), scaled, sums=case.sums)[0]))
        assert torch.equal(codes(turned), codes(transpose_by_torch(rows)))


def test_heads_that_are_no_whole_vectors_are_left() -> None:
    assert why_not(PackedHeads(4, 4, 12), torch.bfloat16) == "heads of 12 features are no vectors of 8"
    assert not why_not(PackedHeads(4, 4, 12), torch.float32) and not why_not(PackedHeads(4, 4, 24), torch.float16)
