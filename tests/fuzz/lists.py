"""Random lists of operations: what hypothesis draws, and how one is built and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import torch

import te_fuser
from te_fuser import compare, ops
from te_fuser.dtypes import FLOAT8
from te_fuser.formula import absolute, clamp, concat, exp, log, maximum, minimum, row_max, row_sum, split, tanh, where
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
from te_fuser.verify import Row, models
from te_fuser.verify.examples import LAYOUTS, Case
from te_fuser.verify.models import Subject, VerifiedCall, gradient_names
from tests.float8 import Dequantized  # noqa: F401 - by name in a list
from tests.fuzz.covers import GENERATED_PLANS, PLANS
from tests.fuzz.numbers import EXTREME_OPS, NUMBERS, Enlarged, Tied, judge_kinds  # noqa: F401 - by name in a list

# ---------------------------------------------------------------------------------- ops that only the fuzzer has


class Softmax(ops.RowOp):
    """y = exp(x - max(x)) / sum(exp(x - max(x)))."""

    def compute(self, x: Any) -> Any:
        e = exp(x - row_max(x))
        return e / row_sum(e)


class Softplus(ops.RowOp):
    """y = max(x, 0) + log(1 + exp(-|x|))."""

    def compute(self, x: Any) -> Any:
        return maximum(x, 0.0) + log(1.0 + exp(-absolute(x)))


class Turned(ops.RowOp):
    """The halves swapped, one of them negated and limited."""

    def compute(self, x: Any) -> Any:
        first, second = split(x, 2)
        return concat([-clamp(second, -1.5, 2.0), first * 0.5])


class Leaky(ops.RowOp):
    """Several branches by the sign of x, and a tie with its own mean."""

    def compute(self, x: Any) -> Any:
        return where(x > 0, tanh(x), minimum(x * 0.1, 1.0)) + maximum(x, -x)


class Squeezed(ops.RowOp):
    """Scaled by a function of its product with a weight."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(features))

    def compute(self, x: Any, weight: Any) -> Any:
        total = row_sum(x * weight)
        return x * (1.0 + 0.3 * tanh(total / (row_sum(weight * weight) + 1.0)))


# ------------------------------------------------------------------------------------------------ what is drawn

PLAIN = (
    "ops.GELU()", "ops.GELU('none')", "ops.ReLU()", "ops.SiLU()", "ops.SReLU()", "ops.QGELU()", "ops.Identity()",
    "ops.Scale(value=0.5)", "ops.Scale(value=-1.0)", "ops.Scale(value=1.0)",
    "Softmax()", "Softplus()", "Leaky()",
)  # fmt: skip
WITH_PARAMETERS = ("ops.Bias({f})", "ops.Scale({f})", "ops.Scale(())", "Squeezed({f})")
# Such an eps, because a norm with a small one does not see its input's scale: what is left of the gradient of a scale
# before it would be rounding alone. A single feature is never normalized, for the same reason: in bfloat16 it is not
# the one, unrounded, that the statistic of its row was taken from.
NORMS = (
    "ops.LayerNorm({f}, 0.3)", "ops.LayerNorm({f}, 0.3, bias=False)",
    "ops.LayerNorm({f}, 0.3, zero_centered_gamma=True)", "ops.RMSNorm({f}, 0.3)",
    "ops.RMSNorm({f}, 0.3, zero_centered_gamma=True)", "ops.L2Norm(0.3)",
)  # fmt: skip
FLOAT32_NORMS = ("ops.LayerNorm({f}, 0.3, dtype=torch.float32)", "ops.RMSNorm({f}, 0.3, dtype=torch.float32)")
GATED = (
    "ops.GLU()", "ops.GEGLU()", "ops.QGEGLU()", "ops.ReGLU()", "ops.SReGLU()", "ops.SwiGLU()", "ops.ClampedSwiGLU()",
    "ops.GEGLU(approximate='none')", "ops.ClampedSwiGLU(limit=0.5)", "ops.SwiGLU(gate_first=False)",
)  # fmt: skip
RANDOM = ("ops.Dropout(0.3)", "ops.Dropout(0.0)", "ops.Dropout(1.0)", "ops.DropPath(0.4, 0)")
DTYPES = ("float32", "bfloat16", "float16", "float64")
RECIPES = {
    "hybrid": DelayedScaling(amax_history_len=2),
    "e4m3": DelayedScaling(fp8_format=Format.E4M3, margin=1),
    "weight_kept": DelayedScaling(override_linear_precision=(False, False, True)),
    "forward_kept": DelayedScaling(override_linear_precision=(True, False, False)),
    "current": Float8CurrentScaling(),
    "mx": MXFP8BlockScaling(),
    "blocks": Float8BlockScaling(),
}
WIDE = (16, 16, 32, 48, 24)  # features of products in regions; whole blocks with some that are none
IN_BLOCKS = (128, 128, 256, 48)
JUDGES = {"extreme": judge_kinds}  # what holds results against the reference, where it is not as verify does
_BAD_LUCK = 1.5


@dataclass(frozen=True)
class FuzzCase:
    """One list and how it is run, as text: `repr` gives Python to paste."""

    model: str
    setup: tuple[str, ...] = ()
    shape: tuple[int, ...] = (3, 4)
    dtype: str = "float32"
    inputs: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    outputs: tuple[str, ...] = ()
    layout: str = "contiguous"
    upstream: str = "contiguous"
    frozen: int = 0  # bits: the input, then each leaf
    calls: int = 1
    training: bool = True
    memory: str | int = "balanced"
    plan: str = "default"
    seed: int = 0
    autocast: bool = False
    steps: bool = False  # also check every step on the data it sees
    kernels: str = "reference"
    numbers: str = "plain"  # what the input holds, a key of NUMBERS
    recipe: str = ""  # of the region around it, a key of RECIPES; empty: there is none

    def __repr__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        lines = "".join(f"    {name}={value!r},\n" for name, value in given)
        return f"FuzzCase(\n{lines})"

    def script(self) -> str:
        """Python that runs this case."""
        return f"from tests.fuzz.lists import FuzzCase\n\nprint(*{self!r}.check(), sep='\\n')\n"

    def build(self) -> te_fuser.Sequential:
        """The model, with random parameters."""
        names = {**globals(), "memory": self.memory, "kernels": self.kernels}
        # Ops draw their own start from PyTorch's generator: without a seed a case would not be the same twice.
        with _default_dtype(getattr(torch, self.dtype)), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            exec("\n".join(self.setup), names)
            model = eval(self.model, names)
        rng = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for p in model.parameters():
                spread = 0.3 if p.dim() < 2 else 0.5 / max(p.shape[-1], 1) ** 0.5
                p.add_((torch.randn(p.shape, generator=rng, dtype=torch.float64) * spread).to(p.dtype))
        return model.train(self.training)

    def check(self) -> list[Row]:
        """The rows that fail by more than bad luck: among millions of results some err by a bit more than twice.

        Where one does, plain PyTorch is asked on ten times as many neighbours: what is luck it then meets too.
        """
        if not self._failing():
            return []
        with mock.patch.object(compare, "_NEIGHBOURS", 10 * compare._NEIGHBOURS):
            return self._failing()

    def _failing(self) -> list[Row]:
        with PLANS[self.plan](self.seed), torch.autocast("cpu", enabled=self.autocast):
            model = self.build()
            rng = torch.Generator().manual_seed(self.seed + 1)
            dtype = getattr(torch, self.dtype)
            x = NUMBERS[self.numbers](torch.randn(self.shape, generator=rng, dtype=torch.float64), rng).to(dtype)
            inputs = {
                name: torch.randn(shape, generator=rng, dtype=torch.float64).to(getattr(torch, own))
                for name, shape, own in self.inputs
            }
            call = VerifiedCall(x, inputs, self.outputs, gradient_names(model, inputs))
            leaves = ["input", *(f"input {n}" for n in inputs), *(n for n, _ in model.named_parameters())]
            frozen = frozenset(n for k, n in enumerate(leaves) if self.frozen >> k & 1)
            case = Case("fuzz", None, None, self.layout, self.upstream, frozen, self.calls)
            for _ in range(2 if self.recipe else 0):  # so that scales move
                with self._region():
                    _run(model, call)
            with mock.patch.object(models, "judge", JUDGES.get(self.numbers, models.judge)), self._region():
                rows = Subject(model, None).check(case, call)
                if self.steps:
                    rows += _wrong_steps(model, call)
            return [row for row in rows if row.share > _BAD_LUCK]

    def _region(self) -> contextlib.AbstractContextManager[Any]:
        return te_fuser.autocast(recipe=RECIPES[self.recipe]) if self.recipe else contextlib.nullcontext()


def _wrong_steps(model: te_fuser.Sequential, call: VerifiedCall) -> list[Row]:
    """Run the model with each step verified."""
    model.verify = True
    try:
        _run(model, call)
    except te_fuser.VerificationError as error:
        return [Row("fuzz", "a step", note=str(error))]
    return []


def _run(model: te_fuser.Sequential, call: VerifiedCall) -> None:
    """Forward and backward."""
    x = call.x.clone().requires_grad_()
    inputs = {n: t.clone().requires_grad_(n in call.differentiable) for n, t in call.inputs.items()}
    made = model(x, outputs=call.outputs, **inputs)
    results = [y for y in (made if isinstance(made, tuple) else (made,)) if y.requires_grad]
    torch.autograd.backward(results, [torch.randn_like(y) for y in results])


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class _Writer:
    """Writes a list op by op; knows shape and dtype at the point it has come to."""

    def __init__(self, draw: st.DrawFn, shape: tuple[int, ...], dtype: str, numbers: str = "plain") -> None:
        self.draw, self.shape, self.dtype, self.now, self.numbers = draw, shape, dtype, dtype, numbers
        self.quantizes = False
        self.wide: tuple[int, ...] = ()
        self.setup: list[str] = []
        self.inputs: dict[str, tuple[tuple[int, ...], str]] = {}
        self.outputs: list[str] = []
        self.shared: list[tuple[str, int, int]] = []
        self.names = 0

    @property
    def features(self) -> int:
        return self.shape[-1]

    def name(self, stem: str) -> str:
        self.names += 1
        return f"{stem}{self.names}"

    def pick(self, choices: tuple[str, ...]) -> str:
        return self.draw(st.sampled_from(choices)).format(f=self.features)

    def list(self, most: int, depth: int) -> list[str]:
        """Up to `most` items."""
        items: list[str] = []
        for _ in range(self.draw(st.integers(0, most))):
            able = [kind for kind, (may, _) in KINDS.items() if may(self, depth)]
            items += KINDS[self.draw(st.sampled_from(able))][1](self, depth)
        return items

    def branch(self, depth: int) -> list[str]:
        """Items that give the shape and dtype they take."""
        before, now = self.shape, self.now
        items = self.list(4, depth + 1)
        if self.shape != before:
            items += self.cast(self.dtype)
            items += [f"ops.Linear({self.features}, {before[-1]})"]
            self.shape = before
        return items + self.cast(now)

    def cast(self, dtype: str) -> list[str]:
        if self.now == dtype:
            return []
        self.now = dtype
        return [f"ops.Cast(torch.{dtype})"]

    def linear(self) -> list[str]:
        sizes = self.wide or (1, 2, 3, 5, 8, 16, 24, 33)
        size = self.draw(st.sampled_from(sizes))
        op = self.pick(("ops.Linear({f}, %d)", "ops.MatMul({f}, %d)", "ops.Linear({f}, %d, bias=False)")) % size
        items = self.cast(self.dtype)
        self.shape = (*self.shape[:-1], size)
        return [*items, op]

    def gated(self) -> list[str]:
        op = self.pick(GATED)
        self.shape = (*self.shape[:-1], self.features // 2)
        return [op]

    def fork(self, depth: int) -> list[str]:
        name = self.name("fork")
        return [f"ops.Fork('{name}')", *self.branch(depth), f"ops.Add('{name}')"]

    def output(self) -> list[str]:
        self.outputs.append(self.name("output"))
        return [f"ops.Output('{self.outputs[-1]}')"]

    def named(self) -> list[str]:
        name = self.name("given")
        kind = self.draw(st.sampled_from(("add", "row", "sample")))
        own = self.dtype if self.dtype == "float64" else self.pick((self.dtype, self.dtype, "float32"))
        self.now = own if own == "float32" else self.now  # a sum has the wider dtype
        if kind == "add" or self.features == 1:
            self.inputs[name] = self.shape, own
            return [f"ops.Add('{name}')"]
        batch_dim = self.draw(st.integers(0, max(len(self.shape) - 2, 0)))
        per_sample = kind == "sample" and len(self.shape) > 1
        shape = (self.shape[batch_dim], self.features) if per_sample else self.shape
        self.inputs |= {f"{name}_scale": (shape, own), f"{name}_shift": (shape, own)}
        how = f"per='sample', batch_dim={batch_dim}" if per_sample else "per='row'"
        return [f"ops.AdaptiveLayerNorm({self.features}, 0.3, scale='{name}_scale', shift='{name}_shift', {how})"]

    def quantized(self) -> list[str]:
        """Numbers of 8 bits, and an op that reads them."""
        name, dtype = self.name("scale"), self.draw(st.sampled_from([*FLOAT8]))
        self.inputs[name] = (), "float32"
        self.now = "float32"
        return [f"ops.Quantize(torch.{dtype}, scale='{name}')", f"Dequantized('{name}')"]

    def share(self) -> list[str]:
        fitting = [(v, o) for v, i, o in self.shared if i == self.features]
        if fitting and self.draw(st.booleans()):
            variable, size = self.draw(st.sampled_from(fitting))
        else:
            variable, size = self.name("shared"), self.features
            norms = NORMS if self.features > 1 else ()
            op = self.pick(
                (*WITH_PARAMETERS, *norms, "ops.Linear({f}, {f})", "ops.MatMul({f}, {f})", "ops.Dropout(0.2)")
            )
            self.setup.append(f"{variable} = {op}")
            self.shared.append((variable, size, size))
        return [*self.cast(self.dtype), variable]

    def reshape(self) -> list[str]:
        total = torch.Size(self.shape).numel()
        halved = self.features // 2 if self.features % 2 == 0 and self.features else self.features
        choices = [(total // max(self.features, 1), self.features), (total // max(halved, 1), halved)]
        if len(self.shape) == 2 and self.shape[0] % 2 == 0:
            choices.append((2, self.shape[0] // 2, self.features))
        self.shape = self.draw(st.sampled_from(choices))
        return [f"ops.Reshape{self.shape}"]

    def attention(self) -> list[str]:
        heads, groups, size = self.draw(st.sampled_from(((1, 1, 4), (2, 2, 3), (4, 2, 2))))
        packed = (heads + 2 * groups) * size
        layout, packing = self.pick(("sequence_first", "batch_first")), self.pick(("interleaved", "blocked"))
        where = f"kv_heads={groups}, layout='{layout}', packing='{packing}'"
        items = [*self.cast(self.dtype), f"ops.Linear({self.features}, {packed})"]
        if size % 2 == 0 and self.draw(st.booleans()):
            items.append(f"ops.RotaryEmbedding({size}, heads={heads}, {where})")
        mask, dropout = self.pick(("none", "causal")), self.draw(st.sampled_from((0.0, 0.2)))
        self.shape = (*self.shape[:-1], heads * size)
        return [*items, f"ops.DotProductAttention({heads}, {size}, mask='{mask}', dropout={dropout}, {where})"]


def _same_dtype(w: _Writer) -> bool:
    return w.now == w.dtype


# Kind of item -> (whether it may come here, what writes it).
Rule = tuple[Callable[[_Writer, int], bool], Callable[[_Writer, int], list[str]]]
KINDS: dict[str, Rule] = {
    "row": (lambda w, d: True, lambda w, d: [w.pick(PLAIN)]),
    "extreme": (lambda w, d: w.numbers == "extreme", lambda w, d: [w.pick(EXTREME_OPS)]),
    "parameters": (lambda w, d: _same_dtype(w), lambda w, d: [w.pick(WITH_PARAMETERS)]),
    "norm": (lambda w, d: _same_dtype(w) and w.features > 1, lambda w, d: [w.pick(NORMS)]),
    "float32 norm": (lambda w, d: w.now == "bfloat16" and w.features > 1, lambda w, d: [w.pick(FLOAT32_NORMS)]),
    "linear": (lambda w, d: True, lambda w, d: w.linear()),
    "gated": (lambda w, d: w.features % 2 == 0, lambda w, d: w.gated()),
    "turned": (lambda w, d: w.features % 2 == 0, lambda w, d: ["Turned()"]),
    "random": (lambda w, d: len(w.shape) > 1, lambda w, d: [w.pick(RANDOM)]),
    "residual": (lambda w, d: d < 3, lambda w, d: [f"te_fuser.Residual({', '.join(w.branch(d))})"]),
    "nested": (lambda w, d: d < 3, lambda w, d: [f"te_fuser.Sequential({', '.join(w.list(4, d + 1))})"]),
    "fork": (lambda w, d: d < 3, lambda w, d: w.fork(d)),
    "output": (lambda w, d: True, lambda w, d: w.output()),
    "named": (lambda w, d: _same_dtype(w), lambda w, d: w.named()),
    "quantized": (lambda w, d: w.quantizes and w.dtype != "float64", lambda w, d: w.quantized()),
    "shared": (lambda w, d: True, lambda w, d: w.share()),
    "cast": (lambda w, d: w.dtype != "float64", lambda w, d: w.cast(w.pick(("float32", "bfloat16")))),
    "reshape": (lambda w, d: d == 0, lambda w, d: w.reshape()),
    "attention": (lambda w, d: len(w.shape) == 3 and 0 not in w.shape, lambda w, d: w.attention()),
    "module": (lambda w, d: True, lambda w, d: ["torch.nn.Tanh()"]),
}


@st.composite
def fuzz_cases(draw: st.DrawFn, kernels: str = "reference", quantizes: bool = False, regions: bool = False) -> FuzzCase:
    """Lists of any kind and depth, on inputs of any shape, dtype and strides, with numbers of 8 bits or without.

    Args:
        regions: whether products run in 8 bits, by a region around the list.
    """
    narrower = regions or kernels != "reference"  # what products in 8 bits and generated kernels take
    dtype = draw(st.sampled_from(DTYPES[:3] if narrower else DTYPES))
    features = draw(st.one_of(st.integers(1, 67), st.sampled_from((8, 16, 32, 64))))
    recipe = draw(st.sampled_from([*RECIPES])) if regions else ""
    wide = IN_BLOCKS if recipe == "blocks" else WIDE if regions else ()
    features = draw(st.sampled_from([n for n in wide if n != 24])) if wide else features
    rows, side = st.integers(0, 40), st.integers(1, 6)
    leading = draw(
        st.one_of(st.tuples(rows), st.tuples(st.integers(0, 6), side), st.just(()), st.tuples(side, side, side))
    )
    shape = (*leading, features)
    narrow = ("plain", "ties") if quantizes else ("plain",)
    numbers = draw(st.sampled_from(narrow if quantizes or regions else ("plain", "plain", *NUMBERS)))
    writer = _Writer(draw, shape, dtype, numbers)
    writer.quantizes, writer.wide = quantizes, wide
    items = writer.list(8, 0)
    return FuzzCase(
        f"te_fuser.Sequential({', '.join([*items, 'memory=memory', 'kernels=kernels'])})",
        tuple(writer.setup),
        shape,
        dtype,
        tuple((name, *given) for name, given in writer.inputs.items()),
        tuple(n for n in writer.outputs if draw(st.booleans())),
        draw(st.sampled_from([n for n in LAYOUTS if n != "ones"])),
        draw(st.sampled_from([*LAYOUTS])),
        draw(st.one_of(st.just(0), st.integers(0, 255))),
        draw(st.sampled_from((1, 1, 1, 2))),
        draw(st.booleans()),
        draw(st.sampled_from(("balanced", "fast", "lean", 0, 1000))),
        draw(st.sampled_from([*PLANS] if kernels == "reference" else GENERATED_PLANS)),
        draw(st.integers(0, 2**16)),
        dtype == "float32" and not draw(st.integers(0, 5)),
        numbers != "extreme" and not draw(st.integers(0, 3)),
        kernels,
        numbers,
        recipe,
    )
