"""Parts of CUDA text: lines, names that are roles, and expressions as statements."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from te_fuser.codegen.cuda_formulas import is_boolean
from te_fuser.codegen.schedule import above
from te_fuser.codegen.text import COMPARISONS, Lines, RoleNames, shortest, to_float32
from te_fuser.dtypes import TABLE
from te_fuser.formula import expr
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.functions import FUNCTIONS

CTYPES = {name: row.cuda for name, row in TABLE.items() if row.cuda}
# Rounds of blocks that are more than any rows need, and less than a grid may have.
EVERY_ROW = 1 << 18
FINISH_THREADS = 256  # of a block that adds up partial sums: kFinishThreads in te_cuda.cuh


class Text(Lines):
    """Lines, with the loops of CUDA."""

    def loop(
        self, variable: str, count: str, unroll: str = "#pragma unroll"
    ) -> contextlib.AbstractContextManager[None]:
        self(unroll)
        return self.block(f"for (int {variable} = 0; {variable} < {count}; ++{variable})")


class CudaNames(RoleNames):
    """Identifiers made from roles, each given out once."""

    own_words = """
    rows row base wanted mine count first step lane slot column chunk i tile group groups split splits sample index
    ahead early later alone phase exchange turn shelves fetch_row fetch_numbers shared_sums found raised
    block start left four block_scales seed seed_value seed_offset batch_inner batch_size
    threadIdx blockIdx gridDim blockDim
    """


def literal(number: float | Fraction) -> str:
    """A float literal: the shortest that gives this float32."""
    single = to_float32(float(number))
    if math.isnan(single):
        return "te::as_float(0x7fc00000u)"
    if math.isinf(single):
        return "te::infinity()" if single > 0 else "-te::infinity()"
    text = shortest(single)
    return f"{text}f" if "." in text or "e" in text else f"{text}.0f"


# ------------------------------------------------------------------------------------------ expressions

_INFIX = {"add": "+", "sub": "-", "mul": "*", **COMPARISONS}
_LONGEST = 72  # characters of an expression before it gets a name of its own


@dataclass
class Formulas:
    """Writes nodes as statements; a value that is used once stands inside the expression that uses it."""

    names: CudaNames
    space: str  # "te::fast" or "te::precise"

    def write(self, text: Text, targets: Sequence[Expr], known: dict[int, str], leaf: Callable[[Expr], str]) -> None:
        """Emit what `targets` need and is not in `known` (node id -> text), and add their texts to `known`."""
        order = above(targets, known)
        uses = Counter(id(a) for n in order for a in n.args)
        uses.update(id(t) for t in targets)
        for node in order:
            if node.op == "const":
                known[id(node)] = literal(node.attrs[0])
                continue
            body = self._operation(node, known) if node.args else leaf(node)
            if node.args and uses[id(node)] == 1 and len(body) <= _LONGEST:
                is_open = node.op in _INFIX or node.op in ("where", "masked")  # inside another it needs parentheses
                known[id(node)] = f"({body})" if is_open else body
            else:
                role = "t"
                if node.op in ("input", "keep"):  # a tensor by its name, its elements with _i
                    role = f"{part_role(node)}_i" if node.axes & Axes.FEATURE else f"{node.attrs[0]}_value"
                known[id(node)] = self.names.fresh(role)
                text(f"const {'bool' if is_boolean(node) else 'float'} {known[id(node)]} = {body};")

    def _operation(self, node: Expr, known: Mapping[int, str]) -> str:
        args = [number(a, known) for a in node.args]
        if node.op in _INFIX:
            sign = "-" if node.op == "mul" and expr.is_const(node.args[0], -1) else f"{args[0]} {_INFIX[node.op]} "
            return sign + args[1]
        if node.op == "masked":
            return f"{args[0]} * {number(node.args[1], known, literal(node.attrs[0]))}"
        if node.op == "where":
            condition = known[id(node.args[0])] if is_boolean(node.args[0]) else f"{args[0]} != 0.0f"
            return f"{condition} ? {args[1]} : {args[2]}"
        listed = ", ".join([*map(bare, args), *map(literal, node.attrs)])
        function = FUNCTIONS[node.op].cuda or f"{{}}::{node.op}"
        return f"{function.format(self.space)}({listed})"


def number(node: Expr, known: Mapping[int, str], one: str = "1.0f") -> str:
    """The node as a float, where a condition counts as `one` or zero."""
    return f"({known[id(node)]} ? {one} : 0.0f)" if is_boolean(node) else known[id(node)]


def bare(text: str) -> str:
    """Text without the parentheses around the whole, if any."""
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return text[1:-1] if at > 0 and at == len(text) - 1 and text[0] == "(" else text
    return text


def part_role(e: Expr) -> str:
    name, offset = e.attrs[0], e.attrs[-2]
    return f"{name}_{offset // e.width}" if e.is_part else name
