"""Random lists of which two ranks have a part each, against the same list in one process, in float64.

`python -m tests.parallel.random_cuts --lists 1000` runs any number of them.
"""

from __future__ import annotations

import argparse
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
from tests.parallel.cutting import assert_as_whole, part
from tests.parallel.ranks import Ranks, on_ranks
from tests.twins import randomize, tensor

FEATURES, HEADS, HEAD_DIM = 16, 4, 4
# Whatever the features are; those that a rank may have a part of are `POINTWISE`.
POINTWISE = ("GELU", "SiLU", "ReLU", "Tanh", "Dropout")
ROWWISE = (*POINTWISE, "LayerNorm", "RMSNorm", "Bias", "Softmax", "DropPath")
PRODUCTS = ("mlp", "gated", "attention")


@dataclass(frozen=True)
class Block:
    """Two products that ranks share and what is between, or ops on rows; maybe with a residual around them."""

    kind: str
    between: tuple[str, ...] = ()
    bias: bool = True
    dropout: float = 0.0
    residual: bool = False
    inner: int = 12


@dataclass(frozen=True)
class Case:
    """A list, and how ranks share it."""

    blocks: tuple[Block, ...]
    sequence_parallel: bool
    dim: int
    shape: tuple[int, int]
    memory: str
    training: bool

    def build(self, shared: bool) -> te_fuser.Sequential:
        """The list, with all of its parameters, or with this rank's part of those that ranks share."""
        parts = [part for block in self.blocks for part in self._parts(block)]
        model = te_fuser.Sequential(*parts, kernels="reference", memory=self.memory).double().train(self.training)
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
            groups = 2 if block.inner % 8 else HEADS
            wide, inner, gates = (HEADS + 2 * groups) * HEAD_DIM, HEADS * HEAD_DIM, 1
            layout = ("sequence_first", "batch_first")[self.dim]
            keywords: dict[str, Any] = {"kv_heads": groups, "mask": "causal", "layout": layout}
            middle: list[nn.Module] = [ops.DotProductAttention(HEADS, HEAD_DIM, dropout=block.dropout, **keywords)]
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
        """What each rank has, against what one process computes."""
        whole, cut = self.build(shared=False), self.build(shared=True)
        ends = (self.dim if self.sequence_parallel else None,) * 2
        x = tensor(*self.shape, FEATURES, grad=False)
        assert_as_whole(cut, whole, {"x": x}, self.gates(whole), ends)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Lists with at least one block of products."""

    def block(kinds: tuple[str, ...]) -> Block:
        return Block(
            draw(st.sampled_from(kinds)),
            tuple(draw(st.lists(st.sampled_from(ROWWISE), max_size=3))),
            draw(st.booleans()),
            draw(st.sampled_from((0.0, 0.25))),
            draw(st.booleans()),
            draw(st.sampled_from((4, 12, 16, 18))),
        )

    every = (*PRODUCTS, "rows")
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    blocks = [block(every) for _ in range(before)] + [block(PRODUCTS)] + [block(every) for _ in range(after)]
    blocks = [b for b in blocks if b.kind != "rows" or b.between]
    shape = draw(st.sampled_from(((4, 2), (2, 4), (6, 4), (2, 2))))
    memory = draw(st.sampled_from(("balanced", "fast", "lean")))
    return Case(tuple(blocks), draw(st.booleans()), draw(st.integers(0, 1)), shape, memory, draw(st.booleans()))


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
            seed(given_arguments.seed)(chosen(given(cases())(one)))()
        finally:
            ranks.stop()
    print(f"{count} lists that ranks share are as the whole ones")
    return 0


if __name__ == "__main__":
    sys.exit(main())
