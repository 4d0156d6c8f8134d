"""Random lists of which two ranks have a part each, against the same list in one process.

Exactly in float64; in a region of FP8 in float32, where a number next to a tie may be rounded the other way. By copies
with kernels and products of a GPU that the CPU stands for, in float32, too.

`python -m tests.parallel.random_cuts --lists 1000` runs any number of them, with `--copies` by copies.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.quantization import amax_allreduce, scale_update
from tests.parallel.cutting import assert_as_whole, fill, own, part, sizes_of
from tests.parallel.cutting import run as run_once
from tests.parallel.ranks import Ranks, on_ranks
from tests.peers import emulated
from tests.twins import randomize, tensor

FEATURES, HEADS = 16, 4
# Whatever the features are; those that a rank may have a part of are `POINTWISE`.
POINTWISE = ("GELU", "SiLU", "ReLU", "Tanh", "Dropout")
ROWWISE = (*POINTWISE, "LayerNorm", "RMSNorm", "Bias", "Softmax", "DropPath")
PRODUCTS = ("mlp", "gated", "attention")
INNER = (4, 12, 16, 18)
WIDE = (32, 64)  # in a region: what a rank has of them runs in 8 bits as the whole does
STEPS = 3  # in a region: scales are 1 in the first, and follow from amaxes of one and of two in the others
FLIPPED = 1e-2  # of the scale: what numbers that are rounded the other way come to; of wrong scales all are
NEAR = {"rtol": 1e-3, "atol": 1e-4}


@dataclass(frozen=True)
class Block:
    """Two products that ranks share and what is between, or ops on rows; maybe with a residual around them."""

    kind: str
    between: tuple[str, ...] = ()
    bias: bool = True
    dropout: float = 0.0
    residual: bool = False
    inner: int = 12
    turned: bool = False  # attention: heads are normed and turned


@dataclass(frozen=True)
class Case:
    """A list, and how ranks share it."""

    blocks: tuple[Block, ...]
    sequence_parallel: bool
    dim: int
    shape: tuple[int, int]
    memory: str
    training: bool
    region: bool = False
    copies: bool = False

    def build(self, shared: bool) -> te_fuser.Sequential:
        """The list, with all of its parameters, or with this rank's part of those that ranks share."""
        parts = [part for block in self.blocks for part in self._parts(block)]
        kernels = "auto" if self.copies else "reference"
        model = te_fuser.Sequential(*parts, kernels=kernels, memory=self.memory)
        model = model.to(torch.float32 if self.region or self.copies else torch.float64).train(self.training)
        randomize(model)
        for op in model.modules() if shared else ():
            mode = op.__dict__.pop("cut_as", None)
            if mode is not None:
                self._share(op, *mode)
        return model

    def _parts(self, block: Block) -> list[nn.Module]:
        made = [self._row_op(name, FEATURES) for name in block.between]
        if block.kind in PRODUCTS:
            made = [self._row_op("LayerNorm", FEATURES), *self._products(block)]
        return [te_fuser.Residual(*made)] if block.residual else made

    def _products(self, block: Block) -> list[nn.Module]:
        if block.kind == "attention":
            groups, head_dim = 2 if block.inner in (18, 64) else HEADS, 8 if self.region else 4
            wide, inner, gates = (HEADS + 2 * groups) * head_dim, HEADS * head_dim, 1
            layout = ("sequence_first", "batch_first")[self.dim]
            keywords: dict[str, Any] = {"kv_heads": groups, "mask": "causal", "layout": layout}
            middle: list[nn.Module] = [ops.DotProductAttention(HEADS, head_dim, dropout=block.dropout, **keywords)]
            if block.turned:
                heads: dict[str, Any] = {"heads": HEADS, "kv_heads": groups}
                turning = ops.RotaryEmbedding(head_dim, layout=layout, **heads)
                middle = [ops.HeadNorm(head_dim, **heads), turning, *middle]
        else:
            inner, gates = block.inner, 1 + (block.kind == "gated")
            wide = gates * inner
            middle = [ops.SwiGLU()] if gates > 1 else []
        middle += [self._row_op(name, inner) for name in block.between if name in POINTWISE]
        first, last = ops.Linear(FEATURES, wide, bias=block.bias), ops.Linear(inner, FEATURES, bias=block.bias)
        first.__dict__["cut_as"], last.__dict__["cut_as"] = ("column", gates), ("row", 1)
        return [first, *middle, last]

    def _row_op(self, name: str, features: int) -> nn.Module:
        if name in ("LayerNorm", "RMSNorm", "Bias"):
            return getattr(ops, name)(features)  # type: ignore[no-any-return]
        if name == "DropPath":
            return ops.DropPath(0.3, 1 - self.dim)
        return ops.Dropout(0.3) if name == "Dropout" else getattr(ops, name)()  # type: ignore[no-any-return]

    def _share(self, op: Any, mode: str, gates: int) -> None:
        column = mode == "column"
        sizes = [op.weight.shape[0] // gates] * gates
        op.weight = nn.Parameter(part(op.weight.detach(), 0, sizes) if column else part(op.weight.detach(), 1))
        if column and op.bias is not None:
            op.bias = nn.Parameter(part(op.bias.detach(), 0, sizes))
        op.parallel_mode, op.group = mode, dist.group.WORLD
        op.sequence_parallel, op.sequence_dim = self.sequence_parallel, self.dim

    def gates(self, whole: te_fuser.Sequential) -> dict[str, tuple[int, ...]]:
        """The sizes of the parts of parameters that are cut part by part, by name; of others none.

        Longer names come first, as what is looked up need only contain one.
        """
        gated = {name: op for name, op in whole.named_modules() if op.__dict__.get("cut_as", ("", 1))[1] > 1}
        sizes = {
            f"{name}.{p}": (op.weight.shape[0] // 2,) * 2 for name, op in gated.items() for p in ("weight", "bias")
        }
        names = sorted(dict(whole.named_parameters()), key=len, reverse=True)
        return {name: sizes.get(name, ()) for name in names}

    def check(self) -> None:
        """Compare the results of each rank with those of one process."""
        whole, cut = self.build(shared=False), self.build(shared=True)
        if self.region:
            check_in_region(self, whole, cut)
            return
        ends = (self.dim if self.sequence_parallel else None,) * 2
        x = tensor(*self.shape, FEATURES, grad=False)
        if not self.copies:
            assert_as_whole(cut, whole, {"x": x}, self.gates(whole), ends)
            return
        with emulated():
            assert_as_whole(cut, whole, {"x": x.float()}, self.gates(whole), ends, within=NEAR)


def check_in_region(case: Case, whole: te_fuser.Sequential, cut: te_fuser.Sequential) -> None:
    """Train some steps in a region, where ranks agree on amaxes: parts are quantized as the whole is."""
    agree_anew()
    fill(cut, whole, case.gates(whole))
    at = case.dim if case.sequence_parallel else None
    flipped = 0.0
    for step in range(STEPS):
        x = tensor(*case.shape, FEATURES, grad=False, seed=step).float()
        dy = tensor(*case.shape, FEATURES, grad=False, seed=9 + step).float()
        with te_fuser.autocast(recipe=te_fuser.recipe.DelayedScaling(amax_history_len=2)):
            y, want = run_once(whole, {"x": x}, lambda _, dy=dy: dy)
            own_dy, own_x = (t if at is None else part(t, at) for t in (dy, x))
            got, gradients = run_once(cut, {"x": own_x}, lambda _, dy=own_dy: dy)
        found = {"output": (got, y if at is None else part(y, at))}
        for name, gradient in gradients.items():
            assert gradient is not None, name
            found[name] = gradient, own(want[name], gradient, sizes_of(name, case.gates(whole)))
        for name, (one, other) in found.items():
            if not torch.allclose(one, other, **NEAR):
                apart = ((one - other).norm() / other.norm()).item()
                flipped = max(flipped, apart)
                assert apart <= FLIPPED, f"step {step}: {name}: {apart:.1e} of its scale apart"
    if flipped:
        print(f"numbers are rounded the other way: {flipped:.1e} apart")


def agree_anew() -> None:
    """Let ranks agree on the amaxes of products that are there now, as at the first region of a program."""
    gc.collect()
    amax_allreduce._kept.clear()
    scale_update.recorded.region, scale_update.recorded.is_new = None, False


@st.composite
def cases(draw: st.DrawFn, copies: bool = False) -> Case:
    """Lists with at least one block of products."""

    region = draw(st.integers(0, 7)) == 7 and not copies

    def block(kinds: tuple[str, ...]) -> Block:
        return Block(
            draw(st.sampled_from(kinds)),
            tuple(draw(st.lists(st.sampled_from(ROWWISE), max_size=3))),
            draw(st.booleans()),
            draw(st.sampled_from((0.0, 0.25))),
            draw(st.booleans()),
            draw(st.sampled_from(WIDE if region else INNER)),
            draw(st.booleans()),
        )

    every = (*PRODUCTS, "rows")
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    blocks = [block(every) for _ in range(before)] + [block(PRODUCTS)] + [block(every) for _ in range(after)]
    blocks = [b for b in blocks if b.kind != "rows" or b.between]
    shape = draw(st.sampled_from(((4, 2), (2, 4), (6, 4), (2, 2))))
    memory = draw(st.sampled_from(("balanced", "fast", "lean")))
    sequence_parallel, dim, training = draw(st.booleans()), draw(st.integers(0, 1)), draw(st.booleans())
    return Case(tuple(blocks), sequence_parallel, dim, shape, memory, training, region, copies)


@on_ranks
def on_each(case: Case) -> None:
    torch.manual_seed(0)
    case.check()


def run(ranks: Ranks, case: Case) -> None:
    """Check a case on all ranks.

    Raises:
        RanksFailedError: where one finds a difference.
    """
    ranks.run(vars(on_each)["body"], {"case": case})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parallel.random_cuts", description=__doc__)
    parser.add_argument("--lists", type=int, default=1000, help="how many lists (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="which lists (%(default)s)")
    parser.add_argument("--copies", action="store_true", help="by copies, on GPUs that this CPU stands for")
    given_arguments = parser.parse_args()
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(Path(folder), "avx512")

        def one(case: Case) -> None:
            nonlocal count
            count += 1
            if count % 100 == 0:
                print(f"{count} lists", flush=True)
            run(ranks, case)

        chosen = settings(
            max_examples=given_arguments.lists, database=None, deadline=None, suppress_health_check=list(HealthCheck)
        )
        try:
            seed(given_arguments.seed)(chosen(given(cases(given_arguments.copies))(one)))()
        finally:
            ranks.stop()
    print(f"{count} lists that ranks share are as the whole ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
