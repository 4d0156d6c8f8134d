"""Cases for the kernel over packed heads, with and without a GPU: settings, inputs, the meaning."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_fuser.fusions.dot_product_attention import declare
from te_fuser.kernels.attention.pytorch import CpuFlash
from te_fuser.kernels.heads_pass import Scaled
from te_fuser.kernels.packed_heads import PackedPass, Packing, Parts, Rotation, turn
from te_fuser.kernels.packed_tiles import PackedTiles, TilePacking, why_not
from te_fuser.kernels.quantizers import transpose_by_torch
from te_fuser.ops.attention.heads import PackedHeads
from te_fuser.ops.base import OpCall
from te_fuser.ops.rotary_embedding import RotaryEmbedding
from tests.float8 import codes

SCALE = 24.0  # of what is stored in 8 bits
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Case:
    """One setting of the kernel.

    Attributes:
        rotary: how many features turn; 0: none.
        bias, sums: dtypes, if any.
        stored: the dtype of 8 bits that the result is scaled to, if it is.
        order: the memory order of the parts' five dimensions [B, G, R, S, D].
    """

    name: str
    heads: PackedHeads
    dtype: torch.dtype
    rotary: int = 0
    style: str = "half"
    parts: bool = False
    back: bool = False
    bias: torch.dtype | None = None
    sums: torch.dtype | None = None
    offset: int = 0
    order: tuple[int, ...] = (3, 0, 1, 2, 4)
    stored: torch.dtype | None = None

    @property
    def rotation(self) -> Rotation | None:
        return Rotation(self.rotary, 10000.0, self.style, self.offset) if self.rotary else None

    @property
    def kernel(self) -> PackedPass:
        back = self.back or self.parts
        heads = PackedHeads(self.heads.heads, self.heads.kv_heads, self.heads.head_dim, packing=self.heads.packing)
        return PackedPass(
            heads, self.dtype, self.parts, self.rotary, self.style, back, self.bias, self.sums, self.stored
        )

    @property
    def tiles(self) -> PackedTiles:
        """The kernel that stores both layouts."""
        assert self.stored is not None
        return PackedTiles(self.heads, self.dtype, self.stored, self.sums)

    @property
    def tiles_in_blocks(self) -> PackedTiles:
        return PackedTiles(self.heads, self.dtype, E4M3, self.sums, in_blocks=True)

    def inputs(self, samples: int, positions: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The packed source, of both signs, and the bias."""
        rng = torch.Generator().manual_seed(seed)
        shape = (positions, samples) if self.heads.layout == "sequence_first" else (samples, positions)
        x = torch.randn(*shape, self.heads.features, generator=rng).to(self.dtype)
        bias = None if self.bias is None else torch.randn(self.heads.features, generator=rng).to(self.bias)
        return x, bias

    def scaled(self, device: torch.device, scale: float = SCALE) -> Scaled | None:
        """Scaling of the stored result, its largest magnitude in a number of its own."""
        numbers = (torch.tensor(n, device=device) for n in (scale, 0.0))
        return None if self.stored is None else Scaled(self.stored, *numbers)

    def run(
        self, x: torch.Tensor, bias: torch.Tensor | None, scaled: Scaled | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The kernel's result."""
        scaled = scaled or self.scaled(x.device)
        if not self.parts:
            assert self.rotation is not None
            return turn(self.heads, self.rotation, x, back=self.back, bias=bias, sums=self.sums, scaled=scaled)
        return Packing(self.heads, self.rotation)(parts_of(self, x), sums=self.sums, scaled=scaled)

    def meant(
        self, x: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype = torch.float64
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results by the op's own meaning."""
        y = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
        if self.rotary:
            op = RotaryEmbedding(
                self.heads.head_dim, heads=self.heads.heads, kv_heads=self.heads.kv_heads, layout=self.heads.layout,
                packing=self.heads.packing, style=self.style, rotary_dim=self.rotary, position_offset=self.offset,
            )  # fmt: skip
            if self.back or self.parts:
                leaf = torch.zeros_like(y).requires_grad_()
                (y,) = torch.autograd.grad(op.reference(OpCall(), leaf), leaf, y)
            else:
                y = op.reference(OpCall(), y)
        return y, None if self.sums is None else y.reshape(-1, y.shape[-1]).sum(0)


def heads(heads: int, kv_heads: int, dim: int, **options: str) -> PackedHeads:
    return PackedHeads(heads, kv_heads, dim, **options)


BATCH_FIRST, BLOCKED = {"layout": "batch_first"}, {"packing": "blocked"}
CASES = [
    Case("forward", heads(4, 4, 16), BF16, 16),
    Case("forward of one sample's positions", heads(4, 2, 16, **BATCH_FIRST), BF16, 16, bias=BF16, offset=5),
    Case("bias in float32", heads(6, 2, 8, **BLOCKED), F16, 8, bias=F32),
    Case("neighbours", heads(4, 2, 24), F32, 24, "interleaved", bias=F32),
    Case("some neighbours", heads(3, 1, 24, **BLOCKED, **BATCH_FIRST), BF16, 8, "interleaved"),
    Case("some of an odd head", heads(5, 5, 7), F32, 4, "half"),
    Case("neighbours of an odd head", heads(2, 1, 5, **BATCH_FIRST), F16, 4, "interleaved", bias=F16),
    Case("pairs that are no whole vectors", heads(4, 2, 24), BF16, 12),
    Case("pairs in other lanes, a part", heads(4, 2, 32), BF16, 16, bias=BF16),
    Case("lines of pairs", heads(2, 1, 128), BF16, 128, bias=F32),
    Case("lines of pairs, a part", heads(2, 1, 96), F32, 64, offset=2),
    Case("backward", heads(4, 4, 16), BF16, 16, back=True),
    Case("backward with sums", heads(40, 40, 64), BF16, 64, back=True, sums=BF16),
    Case("backward with sums in float32", heads(6, 3, 40, **BLOCKED), F16, 16, "interleaved", back=True, sums=F32),
    Case("packed", heads(4, 4, 16), BF16, parts=True),
    Case("packed with sums", heads(24, 24, 64), BF16, parts=True, sums=BF16),
    Case("packed, turned lines", heads(4, 1, 128, **BLOCKED), F16, 128, parts=True, sums=F32),
    Case("packed of groups", heads(6, 2, 24, **BLOCKED), F16, parts=True, sums=F16, order=(0, 1, 2, 3, 4)),
    Case("packed of samples", heads(6, 2, 16, **BATCH_FIRST), BF16, parts=True, sums=F32, order=(0, 3, 1, 2, 4)),
    Case("packed and turned", heads(8, 2, 16), BF16, 16, parts=True, sums=BF16),
    Case(
        "packed, turned blocks", heads(4, 2, 16, **BLOCKED, **BATCH_FIRST), F32, 8, "interleaved", parts=True, offset=3
    ),
    Case("packed, odd heads", heads(3, 3, 5), F32, 4, parts=True, sums=F32, order=(0, 1, 2, 3, 4)),
    Case("backward in 8 bits", heads(4, 2, 32), BF16, 16, back=True, sums=F32, stored=E5M2),
    Case("lines of pairs in 8 bits", heads(2, 1, 128, **BATCH_FIRST), F32, 128, back=True, stored=E4M3),
    Case("packed in 8 bits", heads(24, 24, 64), BF16, parts=True, sums=BF16, stored=E5M2),
    Case("packed and turned in 8 bits", heads(6, 2, 24, **BLOCKED), F32, 12, parts=True, sums=F32, stored=E4M3),
    Case("packed, odd heads in 8 bits", heads(3, 3, 5), F32, 4, parts=True, stored=E5M2, order=(0, 1, 2, 3, 4)),
]
# Packed in 8 bits in both layouts.
TILES = [
    Case("packed", heads(24, 24, 64), BF16, parts=True, sums=BF16, stored=E5M2),
    Case("one head in two tiles", heads(2, 1, 128), BF16, parts=True, stored=E5M2, order=(0, 1, 2, 3, 4)),
    Case("groups", heads(6, 2, 24), F16, parts=True, sums=F16, stored=E5M2),
    Case(
        "blocks, sample by sample", heads(6, 2, 16, **BLOCKED, **BATCH_FIRST), BF16, parts=True, sums=F32, stored=E4M3
    ),
    Case("in float32", heads(3, 3, 20, **BLOCKED), F32, parts=True, sums=F32, stored=E5M2, order=(0, 3, 1, 2, 4)),
    Case("in float32, sample by sample", heads(4, 2, 16, **BATCH_FIRST), F32, parts=True, stored=E4M3),
]
IN_BLOCKS = [case for case in TILES if not why_not(case.heads, case.dtype, True)]
SIZES = [(1, 1), (2, 7), (3, 33), (1, 130)]  # samples, positions
EMPTY = [(0, 4), (3, 0)]


def parts_of(case: Case, x: torch.Tensor) -> Parts:
    """Queries [B, G, R, S, D], keys and values [B, G, S, D], in the memory order of the case."""
    q, k, v = case.heads.split(x)
    inverse = [case.order.index(d) for d in range(5)]
    q = q.permute(case.order).contiguous().permute(inverse)
    k, v = (t[:, :, None].permute(case.order).contiguous().permute(inverse)[:, :, 0] for t in (k, v))
    return q, k, v


class OnFakeGpu(CpuFlash):
    """PyTorch's attention, whose gradients are packed by the kernel."""

    name = "on_fake_gpu"
    on_cuda = True


ATTENTION = declare(OnFakeGpu(), registered=False)


def complaints(
    case: Case, samples: int, positions: int, got: tuple[torch.Tensor, torch.Tensor | None], seed: int
) -> str:
    """Complaint: a result may err twice as much as PyTorch does in float32 and one rounding, and one unit more."""
    x, bias = case.inputs(samples, positions, seed)
    exact, plain = case.meant(x, bias), case.meant(x, bias, torch.float32)
    for name, one, want, usual in zip(("output", "sums"), got, exact, plain, strict=True):
        if one is None or want is None or usual is None:
            assert one is None and want is None
            continue
        dtype = (case.stored or case.dtype) if name == "output" else case.sums
        if name == "output" and case.stored is not None:
            want, usual = want * SCALE, usual * SCALE
        if one.dtype != dtype or one.shape != want.shape or not one.is_contiguous():
            return f"{name} is {one.dtype} {list(one.shape)}"
        error, allowed = (one.double() - want).abs(), (usual.to(dtype).double() - want).abs()
        scale = max(want.abs().max().item(), 1e-6)
        slack = torch.finfo(one.dtype).eps * scale
        # Sums of float32 numbers err by the order they are added in.
        slack += 2.0**-22 * samples * positions**0.5 * scale if name == "sums" else 0.0
        if not error.max() <= 2 * allowed.max() + slack:
            return f"{name} errs by {error.max():.2e}, PyTorch by {allowed.max():.2e}, of {scale:.2e}"
    return ""


def check_bytes(case: Case, packing: TilePacking, samples: int, positions: int, seed: int, device: str) -> None:
    """Bytes equal those of packing rows and then transposing, with and without what is known of strides."""
    parts = parts_of(case, case.inputs(samples, positions, seed)[0].to(device))
    first: list[torch.Tensor | None] = []
    for _ in range(2):
        scaled, other = (case.scaled(torch.device(device)) for _ in range(2))
        assert scaled is not None and other is not None
        rows, turned, sums = packing(parts, scaled, sums=case.sums)
        wanted, totals = Packing(case.heads)(parts, sums=case.sums, scaled=other)
        assert torch.equal(codes(rows), codes(wanted)) and torch.equal(scaled.amax, other.amax)
        assert torch.equal(codes(turned), codes(transpose_by_torch(wanted)))
        assert (sums is None) == (case.sums is None)
        if sums is not None and totals is not None:
            eps, slack = torch.finfo(sums.dtype).eps, 1e-4 if device == "cpu" else 1e-3
            torch.testing.assert_close(sums.float(), totals.float(), rtol=2 * eps, atol=slack)
        first = first or [sums]
        assert sums is None or torch.equal(sums, first[0])  # type: ignore[arg-type]
