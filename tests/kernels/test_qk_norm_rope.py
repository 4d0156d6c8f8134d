"""The kernel that norms and turns heads, run on the CPU by an emulated driver: settings, inputs, the meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.kernels.heads_pass import Scaled
from te_fuser.kernels.qk_norm_rope import WEIGHTS, Groups, Norming, PassInputs, Turned, TurnedPass, Turning
from tests.fake_cuda import FakeDriver
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
MOST_START = 8
SCALE = 24.0  # of what is stored in 8 bits
_LEAD = {"sequence_first": (0, 1), "batch_first": (1, 0), "tokens": (0,)}


@dataclass(frozen=True)
class Case:
    """One setting of the kernel.

    Attributes:
        rotary: how many features turn; 0: none.
        tables: "angles", "pair" or "cos_sin", of `table_dtype`, for each sample or for all.
        starts, tokens: dtypes of starts and of offsets, if any; tokens are packed.
        padded: whether rows at positions behind the last angles take these; there are such then.
        norm, last, centered, weights: the norm, whether it comes last, its weights' dtype.
        columns: the dtype of the sums of columns in backward, if any.
        stored: the dtype of 8 bits that backward's result is scaled to, if it is.
    """

    name: str
    heads: int
    kv_heads: int | None
    dim: int
    dtype: torch.dtype
    rotary: int = 0
    style: str = "half"
    tables: str = "angles"
    table_dtype: torch.dtype = F32
    by_sample: bool = False
    starts: torch.dtype | None = None
    tokens: torch.dtype | None = None
    padded: bool = False
    norm: str | None = None
    last: bool = False
    centered: bool = False
    weights: torch.dtype = F32
    columns: torch.dtype | None = None
    stored: torch.dtype | None = None
    layout: str = "sequence_first"
    packing: str = "interleaved"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def order(self) -> str:
        return "tokens" if self.tokens else self.layout

    @property
    def features(self) -> int:
        return (self.heads + 2 * (self.kv_heads or 0)) * self.dim

    def passes(self) -> tuple[TurnedPass, TurnedPass]:
        """Forward and backward."""
        groups = Groups.of(self.heads, self.kv_heads, self.dim, self.packing)
        turning = norming = None
        if self.rotary:
            which = (bool(self.heads), self.kv_heads is not None)
            turning = Turning(
                self.rotary, self.style, self.tables, *which, self.table_dtype, self.starts, self.tokens, self.padded
            )
        if self.norm:
            dtype = None if self.norm == "L2Normalization" else self.weights
            norming = Norming(self.norm, self.centered, self.last, dtype)
        ahead = TurnedPass(groups, self.dtype, turning, norming)
        names = tuple(n for n in WEIGHTS if self.norm and n in self.head_norm().parameter_shapes())
        return ahead, TurnedPass(groups, self.dtype, turning, norming, True, self.columns, names, self.stored)

    def head_norm(self) -> ops.HeadNorm:
        assert self.norm is not None
        return ops.HeadNorm(
            self.dim, heads=self.heads, kv_heads=self.kv_heads, norm=self.norm, eps=1e-5,
            zero_centered_gamma=self.centered, packing=self.packing,
        )  # fmt: skip

    def rotation(self) -> ops.RotaryByAngles:
        names: dict[str, Any] = {"angles": "a"}
        if self.tables == "pair":
            names = {"angles": ("a", "b")}
        elif self.tables == "cos_sin":
            names = {"cos_sin": ("a", "b")}
        return ops.RotaryByAngles(
            self.dim, heads=self.heads, kv_heads=self.kv_heads, layout=self.order, packing=self.packing,
            style=self.style, starts="starts" if self.starts else None, offsets="offsets" if self.tokens else None,
            padded=self.padded, **names,
        )  # fmt: skip

    def model(self, parameters: Mapping[str, torch.Tensor], wide: torch.dtype) -> te_fuser.Sequential:
        """The ops, with these parameters."""
        listed: list[Any] = [self.head_norm()] if self.norm else []
        for name, p in parameters.items():
            getattr(listed[0], name).data = p.to(wide)
        if self.rotary:
            listed.insert(0 if self.last else 1, self.rotation())
        return te_fuser.Sequential(*listed, kernels="reference").to(wide)

    def inputs(self, samples: int, positions: int, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
        """x, dy, tables, starts, offsets and weights of a call."""
        rng = torch.Generator().manual_seed(seed)
        count = samples * positions
        lead = (count,) if self.tokens else tuple((positions, samples)[k] for k in _LEAD[self.layout])
        x, dy = (torch.randn(*lead, self.features, generator=rng).to(self.dtype) for _ in range(2))
        length = (count if self.tokens else positions) + (0 if self.padded else MOST_START)
        shape = (length, samples if self.by_sample else 1, 1, self.rotary)
        made = [torch.randn(shape, generator=rng) * (1 if self.tables == "cos_sin" else 40) for _ in range(2)]
        tables = [t.to(self.table_dtype).to(device) for t in made[: 1 if self.tables == "angles" else 2]]
        found: dict[str, Any] = {"x": x.to(device), "dy": dy.to(device), "tables": tables if self.rotary else []}
        if self.tokens:
            ends = sorted(torch.randint(0, count + 1, (3,), generator=rng).tolist())
            found["offsets"] = torch.tensor([0, *ends], dtype=self.tokens, device=device)
        if self.starts:
            many = 3 if self.tokens else samples
            found["starts"] = torch.randint(0, MOST_START + 1, (many,), generator=rng).to(self.starts).to(device)
        names = self.head_norm().parameter_shapes() if self.norm else ()
        found["weights"] = {
            n: (torch.randn(self.dim, generator=rng) + (not self.centered)).to(self.weights).to(device) for n in names
        }
        return found

    def run(self, call: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Results of the kernel: "y", "dx", "columns" and gradients of weights; "amax" where dx is scaled."""
        ahead, back = self.passes()
        given = PassInputs(call["tables"], call.get("starts"), call.get("offsets"), call["weights"])
        y, none = Turned(ahead, self.order, 1e-5)(call["x"], given)
        assert not none
        read = call["x"] if self.norm else None
        scale, amax = (torch.full((), number, device=y.device) for number in (SCALE, 0.0))
        scaled = None if self.stored is None else Scaled(self.stored, scale, amax)
        dx, sums = Turned(back, self.order, 1e-5)(call["dy"], given, read=read, scaled=scaled)
        names = (*(("columns",) if self.columns else ()), *back.gradients)
        found = {"y": y, "dx": dx, **dict(zip(names, sums, strict=True))}
        return found if scaled is None else {**found, "amax": amax}

    def meant(self, call: dict[str, Any], wide: torch.dtype = F64) -> dict[str, torch.Tensor]:
        """Results by the ops' own meaning."""
        model = self.model(call["weights"], wide).to(call["x"].device)
        x = call["x"].to(wide).requires_grad_()
        named = dict(zip("ab", (t.to(wide) for t in call["tables"]), strict=False))
        y = model.reference(x, **named, **{n: call[n] for n in ("starts", "offsets") if n in call})
        norm = next((op for op in model if isinstance(op, ops.HeadNorm)), None)
        leaves = {"dx": x, **(dict(norm.named_parameters()) if norm is not None else {})}
        found = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), call["dy"].to(wide)), strict=True))
        columns = {"columns": found["dx"].reshape(-1, self.features).sum(0)} if self.columns else {}
        if self.stored is not None:
            columns["amax"], found["dx"] = found["dx"].abs().max(), found["dx"] * SCALE
        return {"y": y.detach(), **found, **columns}


BATCH_FIRST, BLOCKED = {"layout": "batch_first"}, {"packing": "blocked"}
I32, I64 = torch.int32, torch.int64
RMS, LAYER, L2 = "RMSNorm", "LayerNorm", "L2Normalization"
CASES = [
    Case("turned lines", 4, 2, 128, BF16, 128),
    Case("turned lines of samples", 4, 2, 128, F16, 128, **BATCH_FIRST, **BLOCKED, by_sample=True),
    Case("turned in other lanes", 4, 2, 64, BF16, 64, columns=BF16),
    Case("a part in other lanes", 8, 4, 32, BF16, 16, tables="cos_sin", table_dtype=BF16, columns=F32),
    Case("neighbours", 4, 4, 24, F32, 24, "interleaved", **BATCH_FIRST),
    Case("some neighbours", 3, 1, 24, BF16, 8, "interleaved", "cos_sin", **BLOCKED),
    Case("neighbours of an odd head", 2, 1, 5, F16, 4, "interleaved", starts=I64),
    Case("behind the last angles", 4, 2, 16, BF16, 16, starts=I64, padded=True),
    Case("some of an odd head", 5, 5, 7, F32, 4, "half", "pair", starts=I32, columns=F32),
    Case("pairs that are no whole vectors", 4, 2, 80, BF16, 40, starts=I64, by_sample=True, **BATCH_FIRST),
    Case("heads alone", 6, None, 96, BF16, 96, by_sample=True, tables="cos_sin"),
    Case("tokens", 4, 2, 64, BF16, 64, tokens=I32),
    Case("tokens with starts", 4, None, 40, F32, 20, "interleaved", tokens=I64, starts=I64),
    Case("keys have angles of their own", 4, 2, 128, BF16, 64, tables="pair", **BLOCKED),
    Case("wide heads", 2, 1, 256, F32, 256, norm=RMS, **BLOCKED, weights=F32),
    Case("many units of a thread", 2, 1, 330, F32, 330, norm=LAYER, columns=F32),
    Case("normed", 4, 2, 128, BF16, norm=RMS, weights=BF16, **BLOCKED),
    Case("normed odd heads", 3, 3, 7, F32, norm=LAYER, centered=True),
    Case("normed keys", 0, 2, 64, BF16, norm=LAYER, weights=BF16, columns=BF16),
    Case("normed queries", 5, None, 64, F16, norm=RMS, weights=F32),
    Case("normed to length 1", 4, 4, 48, BF16, norm=L2),
    Case("normed, then turned", 8, 2, 128, BF16, 128, norm=RMS, weights=BF16, tables="cos_sin", table_dtype=BF16,
         by_sample=True, **BATCH_FIRST, **BLOCKED),
    Case("normed, then turned, centered", 4, 1, 256, BF16, 256, norm=RMS, centered=True, weights=BF16, columns=BF16),
    Case("normed, then turned in lanes", 8, 8, 64, BF16, 32, norm=LAYER, weights=F32, columns=F32),
    Case("turned, then normed", 4, 2, 128, BF16, 128, norm=RMS, last=True, weights=BF16, columns=F32),
    Case("turned, then normed odd heads", 3, 1, 10, F32, 6, norm=LAYER, last=True, tables="pair", starts=I32),
    Case("turned neighbours, then normed", 4, 2, 80, F16, 80, "interleaved", norm=L2, last=True, tokens=I32),
    Case("turned lines in 8 bits", 4, 2, 128, BF16, 128, columns=BF16, stored=torch.float8_e5m2),
    Case("turned in 8 bits", 3, 1, 24, F32, 8, "interleaved", "cos_sin", **BLOCKED, stored=torch.float8_e4m3fn),
    Case("normed, then turned in 8 bits", 4, 2, 64, BF16, 64, norm=RMS, columns=F32, stored=torch.float8_e5m2),
    Case("of many heads", 40, 40, 64, BF16, 64, norm=RMS, weights=F32, columns=BF16),
]  # fmt: skip
SIZES = [(1, 1), (2, 7), (3, 33), (1, 130)]  # samples, positions
EMPTY = [(0, 4), (3, 0)]


def complaints(case: Case, call: dict[str, Any], got: dict[str, torch.Tensor]) -> str:
    """Complaint: a result may err twice as much as PyTorch does in float32 and one rounding, and one unit more."""
    exact, plain = case.meant(call), case.meant(call, F32)
    if got.keys() != exact.keys():
        return f"there are {sorted(got)}, not {sorted(exact)}"
    for name, one in got.items():
        want, usual = exact[name], plain[name].to(one.dtype)
        known = {"y": case.dtype, "dx": case.stored or case.dtype, "columns": case.columns, "amax": F32}
        meant = known.get(name, case.weights)
        if one.dtype != meant or one.shape != want.shape or not one.is_contiguous():
            return f"{name} is {one.dtype} {list(one.shape)}"
        error, allowed = (one.double() - want).abs(), (usual.double() - want).abs()
        scale = max(want.abs().max().item(), 1e-6)
        slack = torch.finfo(one.dtype).eps * scale
        summed = 4e-7 * scale * want.numel() ** 0.5 if name not in ("y", "dx") else 2e-6 * scale
        if not (error.max() <= 2 * allowed.max() + slack + summed):
            return f"{name} errs by {error.max():.3g}, PyTorch by {allowed.max():.3g}, at most {scale:.3g}"
    return ""


pytestmark = needs_compiler
BY_NAME = {case.name: case for case in CASES}
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


emulated = emulating(lambda: (p for case in CASES for p in case.passes()))


@EACH
def test_values_and_gradients(case: Case, emulated: FakeDriver) -> None:
    for seed, (samples, positions) in enumerate(SIZES):
        call = case.inputs(samples, positions, seed)
        assert not complaints(case, call, case.run(call)), (samples, positions)


@EACH
def test_nothing(case: Case, emulated: FakeDriver) -> None:
    for samples, positions in EMPTY:
        call = case.inputs(samples, positions)
        made = case.run(call)
        assert made.pop("y").shape == made.pop("dx").shape == call["x"].shape
        assert all((t == 0).all() for t in made.values())


@pytest.mark.parametrize("name", ["some of an odd head", "tokens with starts"])
def test_rows_without_angles_are_nan(name: str, emulated: FakeDriver) -> None:
    case = BY_NAME[name]
    call = case.inputs(3, 5)
    if case.tokens:
        call["offsets"] = torch.tensor([0, 4, 9, 15], dtype=case.tokens)
    within, length = call["starts"].clone(), call["tables"][0].shape[0]
    known = case.run({**call, "starts": within})
    for wrong in (-5, length):
        found = case.run({**call, "starts": within.index_fill(0, torch.tensor([1]), wrong)})
        for value in ("y", "dx"):
            outside = slice(4, 9) if case.tokens else (slice(None), 1)
            assert found[value][outside].isnan().any(-1).all()
            same = found[value].isnan().any(-1, keepdim=True) | (found[value] == known[value])
            same[outside] = True
            assert same.all() and not known[value].isnan().any()
