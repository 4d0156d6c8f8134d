"""Products of cuBLASLt as fusions, a row for each: the ops that it stands for, and which products compute them.

All else follows: what a product takes is said by its kind, what it costs by its sizes, and why it cannot be by its ops.
A product with an addend starts from it (beta = 1) and writes a tensor of its own, so it does not matter who else reads
what is added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.fusions.declaration import chosen
from te_fuser.fusions.match import Body, Cost, Match
from te_fuser.fusions.registry import Costs, Fusion, Library, register_library
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt.tuning import tune_products
from te_fuser.ops.activations import GELU, ReLU
from te_fuser.ops.base import FusableOperation, Gradient, Spec
from te_fuser.ops.bias_scale import Bias
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.matmul import MatMul, as_rows, in_shape_of
from te_fuser.ops.products import is_torchs, linear
from te_fuser.ops.sizes import asked
from te_fuser.ops.structure import Add
from te_fuser.params.main_grad import put_gradient

register_library(
    Library(
        "cuBLASLt",
        kernels="cuBLASLt's products",
        runs_without="matrix products on the GPU by PyTorch, without fusing anything into them",
        note_without="products run by PyTorch, with nothing fused into them",
        version=products.version,
        obstacle=lambda device: products.obstacle() if device.type == "cuda" else None,
        tune=tune_products,
    )
)

# ----------------------------------------------------------------------------------------- why a match is none


def why_no_product(m: Match, kind: str, at: int = 0) -> str | None:
    """Reason why MatMul number `at` of a match cannot be cuBLASLt's product of that kind."""
    if m.device.type != "cuda":
        return f"cuBLASLt runs on cuda, the input is on {m.device.type}"
    if m.dtype not in products.DTYPES:
        return f"cuBLASLt's products are in bfloat16, float16 and float32, and this one is in {text_of(m.dtype)}"
    if m.target == "torch":
        return "this plan is one of PyTorch's operations alone"
    if kind.startswith("wgrad") and (kind == "wgrad_onto") != m[at].accumulate_into_main_grad:
        return "the weight's gradient goes to its main_grad"
    if m[at].dtype_of("weight") != m.dtype:
        return f"input and weight differ in dtype, {text_of(m.dtype)} and {text_of(m[at].dtype_of('weight'))}"
    if m.capability is not None:  # a GPU that is not at hand cannot be asked
        return None
    return asked(products.refusal, kind, m.dtype, *_sizes(m, kind, at, m.x), m.device)


def why_no_backward(m: Match) -> str | None:
    """Reason against a product that gives only what follows its activation."""
    return "backward reads the value before the activation, and it gives only its output" if m.needs_grad else None


def why_no_bias(m: Match, at: int = 1) -> str | None:
    """Reason against the bias of op `at` in an epilogue, in the product's dtype."""
    dtype = m[at].dtype_of("bias")
    return None if dtype == m.dtype else f"the bias is in {dtype}, the product in {m.dtype}"


def why_no_gelu(m: Match, at: int) -> str | None:
    """Reason for which the epilogues' GELU is not that of op `at`; None if it is."""
    if m[at].approximate != "tanh":
        return "the epilogue's GELU is the tanh form, and this one is exact (erf)"
    if m.dtype == torch.float32:
        return "the epilogue's tanh errs by 1e-5, too much for float32"
    features = m.y.features if at == len(m) - 1 else m.x.features
    if features % products.GELU_MULTIPLE:
        return f"the value before GELU is read and written in rows of a multiple of 8, and this one has {features}"
    return None


def why_no_dropout(m: Match, at: int) -> str | None:
    """Reason for which the Dropout of op `at` cannot be left out; None if it can."""
    return "an epilogue drops nothing, and this Dropout does" if m[at].op.draws() else None


def why_no_addend(m: Match, at: int, dtype: torch.dtype | None = None) -> str | None:
    """Reason against the addend of op `at` for a product in `dtype`, or its input's."""
    added, product = m[at].dtype_of("other"), dtype or m.dtype
    return None if added == product else f"what is added is in {added}, the product in {product}"


# Kind of op -> why an epilogue cannot be that op of a match; in the order in which it is asked.
_EPILOGUES: dict[type[FusableOperation], Callable[[Match, int], str | None]] = {
    Dropout: why_no_dropout,
    Add: why_no_addend,
    GELU: why_no_gelu,
    Bias: why_no_bias,
}


def _sizes(m: Match, kind: str, at: int, x: Spec) -> tuple[int, int, int]:
    """Rows, columns, and what is summed over, for an input x."""
    op = cast(MatMul, m[at])
    return products.product_sizes(kind, x.rows, op.in_features, op.out_features)


# --------------------------------------------------------------------------------- what it costs, what runs

# Kind of product -> the share of a plain product's rate that it reaches, with what else it saves or costs counted in.
# Measured on an H200 by exchanging one fusion at a time in a GPT layer (hidden 4096, ffn 16384, 8192 tokens, bfloat16),
# sustained, in alternating rounds: the card is then at its power limit, and what an epilogue takes alone says little.
# A layer of 16.4 ms, and what it gained by the epilogue instead of a generated kernel: GELU with the value before it
# 0.02 to 0.05 ms, both additions 0.04 ms, the slope of GELU -0.04 ms.
_EFFICIENCY = {
    "forward_bias": 0.99,
    "forward_bias_add": 0.985,
    "forward_add": 0.985,
    "forward_bias_relu": 0.985,
    "forward_bias_gelu": 0.96,
    "forward_bias_gelu_aux": 0.935,
    "dgrad_dgelu": 0.88,
}

# cuBLASLt adds up dy in a kernel of its own after the product, at half a copy's speed: 201 MB took 93 us on an H200.
# It is no launch of ours: such a call took 15.2 us of the host, one without sums 10.4 and a generated kernel's 10.
_SUM_PASSES = 2.0


def cost_of(m: Match, kind: str, at: int = 0) -> Cost:
    """Cost of MatMul number `at` of a match as cuBLASLt's product of that kind."""
    rows, columns, inner = _sizes(m, kind, at, m.x)
    options, size = products.KINDS[kind], m.dtype.itemsize
    epilogue, out = str(options.get("epilogue", "none")), rows * columns * size
    read = inner * (rows + columns) * size + (out if "add" in options else 0) + (out if epilogue[0] == "d" else 0)
    written = out + (out if "aux" in epilogue else 0)
    summed = _SUM_PASSES * inner * rows * size if kind == "wgrad_sum" else 0
    flops, share = 2.0 * rows * columns * inner, _EFFICIENCY.get(kind, 1.0)
    return Cost(read + summed, written, flops, efficiency=share, apart=summed)


def body_of(m: Match, kind: str, at: int = 0) -> Body:
    """MatMul number `at` of a match as the product of that kind, in the match's dtype."""
    form, sizes = products.form_of(kind, m.dtype, m.dtype), _sizes(m, kind, at, m.x.exact())
    describe = functools.partial(products.algorithms_of, form, sizes)
    return Body(products.configured(kind, m.dtype, m.dtype).make, True, form.by_rows, describe)


def put_weight_gradient(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, over: bool = False) -> torch.Tensor:
    """main_grad += dy^T x, or main_grad = dy^T x; gives what stands for it."""

    def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
        products.put_weight_gradient(dy, x, main_grad, add=not over)

    return put_gradient(dy, x, weight, over, put)


# ------------------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class ProductRow:
    """A fusion whose direction is made of products.

    Attributes:
        doc: what it computes, in a sentence.
        forward: the kind of product that runs forward; it begins with the first op.
        backward: the products that run backward, each on its own, of the last MatMul: `method` is the kind, of which
            "wgrad_onto" goes to main_grad.
        emits: values inside the match that forward's product gives beside its output.
        when: why a match is none, asked before its ops and products are; None if they decide.
        instead: what says what runs forward where the product cannot. No match is refused for that then, and the cost
            is a launch's.
    """

    name: str
    doc: str
    pattern: tuple[type[FusableOperation], ...]
    forward: str = ""
    backward: tuple[Gradient, ...] = ()
    emits: tuple[str, ...] = ()
    when: Callable[[Match], str | None] = lambda m: None
    instead: Callable[[Match], Callable[..., torch.Tensor]] | None = None

    @property
    def direction(self) -> str:
        """Direction of the fusion."""
        return "forward" if self.forward else "backward"

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the tensors that forward's product reads, in its order."""
        if not self.forward:
            return ()
        addend = [f"{k}.other" for k, kind in enumerate(self.pattern) if kind is Add]
        return ("input", "0.weight", *addend, *(["1.bias"] if "bias" in self.forward else []))

    @property
    def _last(self) -> int:
        """The MatMul whose products run backward."""
        return max(k for k, kind in enumerate(self.pattern) if kind is MatMul)

    def reasons(self, m: Match) -> Iterator[str | None]:
        """Reasons why products cannot compute a match; None for each that can."""
        for kind, why_not in _EPILOGUES.items():
            if kind in self.pattern:
                yield why_not(m, self.pattern.index(kind))
        if self.forward:
            yield why_no_product(m, self.forward)
        for node in self.backward:
            yield why_no_product(m, node.method, self._last)

    def accepts(self, m: Match) -> bool | str:
        """True where the row takes a match, else the reason why it does not."""
        why = self.when(m)
        if why is None and self.instead is None:
            why = next(filter(None, self.reasons(m)), None)
        return why or True

    def cost(self, m: Match) -> Costs:
        """Cost of the row's products."""
        if self.forward:
            return cost_of(m, self.forward)
        return tuple(cost_of(m, node.method, self._last) for node in self.backward)

    def choose(self, m: Match, method: str) -> Body:
        """Body that runs in a match."""
        if method == "wgrad_onto":
            return Body(functools.partial(put_weight_gradient, over=m[0].overwrite_main_grad))
        if self.instead is not None and any(self.reasons(m)):
            return Body(self.instead(m))
        return body_of(m, self.forward) if method == "forward" else body_of(m, method, self._last)


def declare(row: ProductRow) -> Fusion:
    """The registered fusion of a row, without a body: what runs is chosen for each match."""
    return chosen(
        row.name,
        row.direction,
        row.pattern,
        row.doc,
        when=row.accepts,
        cost=None if row.instead else row.cost,
        emits=row.emits,
        takes=row.takes,
        gives=("output", *row.emits) if row.forward else (),
        gradients=row.backward,
        choose=row.choose,
    )


# ------------------------------------------------------------------------------- a product, its bias and its GELU


def linear_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """y = x W^T + b by the one of PyTorch's libraries that is the faster at hand."""
    # Under autocast the weight comes cast; the epilogue takes a bias of its dtype.
    return in_shape_of(x, linear(as_rows(x), weight, bias if bias.dtype == x.dtype else bias.to(x.dtype)))


def _linear_bias_of(m: Match) -> Callable[..., torch.Tensor]:
    """`linear_bias`, or PyTorch's function where no call has a choice."""
    op, halves = cast(MatMul, m[0]), m.device.type == "cpu" and m.dtype.itemsize == 2
    if halves or m[1].dtype_of("bias") != m.dtype:
        return linear_bias
    settled = is_torchs(m.x.rows, op.in_features, op.out_features, m.dtype, m.device)
    return torch.nn.functional.linear if settled else linear_bias


_ROWS = (
    ProductRow("matmul", "y = x W^T by cuBLASLt.", (MatMul,), forward="forward"),
    ProductRow(
        "matmul_backward",
        "dx = dy W and dW = dy^T x by cuBLASLt, each on its own.",
        (MatMul,),
        backward=(Gradient(("input",), ("0.weight",), "dgrad"), Gradient(("0.weight",), ("input",), "wgrad")),
    ),
    ProductRow(
        "matmul_bias",
        "The product's epilogue adds the bias; gives its output, not the product before the bias.",
        (MatMul, Bias),
        forward="forward_bias",
        when=lambda m: (
            None if m[0].own_dtype_of("weight") == m[1].own_dtype_of("bias") else "weight and bias differ in dtype"
        ),
        instead=_linear_bias_of,
    ),
    ProductRow(
        "matmul_bias_backward",
        "dx = dy W; dW = dy^T x with an epilogue that sums dy over its rows for the bias.",
        (MatMul, Bias),
        backward=(
            Gradient(("input",), ("0.weight",), "dgrad"),
            Gradient(("0.weight", "1.bias"), ("input",), "wgrad_sum"),
        ),
    ),
    ProductRow(
        "matmul_bias_gelu",
        "Gives the output alone.",
        (MatMul, Bias, GELU),
        forward="forward_bias_gelu",
        when=why_no_backward,
    ),
    ProductRow(
        "matmul_bias_gelu_aux",
        "Gives the value before GELU too, which backward reads.",
        (MatMul, Bias, GELU),
        forward="forward_bias_gelu_aux",
        emits=("1.output",),
    ),
    ProductRow(
        "gelu_matmul_backward",
        "The slope of GELU in the epilogue of dy W; dW = dy^T gelu(h) reads GELU's output, which is kept for it.",
        (GELU, MatMul),
        backward=(
            Gradient(("input",), ("1.weight", "input"), "dgrad_dgelu"),
            Gradient(("1.weight",), ("0.output",), "wgrad"),
        ),
    ),
    ProductRow(
        "gelu_matmul_bias_backward",
        "The same, and dW with an epilogue that sums dy over its rows for the bias behind the product.",
        (GELU, MatMul, Bias),
        backward=(
            Gradient(("input",), ("1.weight", "input"), "dgrad_dgelu"),
            Gradient(("1.weight", "2.bias"), ("0.output",), "wgrad_sum"),
        ),
    ),
    ProductRow("matmul_add", "y = x W^T + other.", (MatMul, Add), forward="forward_add"),
    ProductRow(
        "matmul_add_dropout",
        "y = x W^T + other, where Dropout drops nothing.",
        (MatMul, Dropout, Add),
        forward="forward_add",
    ),
    ProductRow("matmul_add_bias", "y = x W^T + b + other.", (MatMul, Bias, Add), forward="forward_bias_add"),
    ProductRow(
        "matmul_add_bias_dropout",
        "y = x W^T + b + other, where Dropout drops nothing.",
        (MatMul, Bias, Dropout, Add),
        forward="forward_bias_add",
    ),
    ProductRow(
        "matmul_bias_relu",
        "Gives the output alone; backward knows from it where ReLU passed what it read.",
        (MatMul, Bias, ReLU),
        forward="forward_bias_relu",
    ),
    ProductRow(
        "matmul_main_grad",
        "dx = dy W; main_grad += dy^T x, or main_grad = dy^T x, in the dtype of main_grad.",
        (MatMul,),
        backward=(
            Gradient(("input",), ("0.weight",), "dgrad"),
            Gradient(("0.weight",), ("input", "0.weight"), "wgrad_onto", by_attributes=("0.weight",)),
        ),
        when=lambda m: None if m[0].accumulate_into_main_grad else "accumulate_into_main_grad is off",
    ),
)

FUSIONS = tuple(map(declare, _ROWS))
