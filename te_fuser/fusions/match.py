"""Interface of a fusion: the matched ops while planning (`Match`), their tensors while running (`FusionCall`).

A fusion answers with the cost of a match (`Cost`) and with what runs there (`Body`).
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fuser.distributed.shard import own_state
from te_fuser.formula.random import RandomStream
from te_fuser.ops.base import FusableOperation, Spec

if TYPE_CHECKING:
    from te_fuser.codegen.cuda_source_kernel import WrittenKernel
    from te_fuser.codegen.description import Layout


@dataclass(frozen=True)
class Cost:
    """Predicted cost of a step: bytes, operations and launches, or seconds.

    Attributes:
        read, written: bytes.
        flops: floating-point operations of matrix products.
        launches: kernels.
        vector_operations: float32 operations outside products.
        seconds: a known time, in seconds; all other fields are then ignored.
        efficiency: the rate of its products over that of large matrix products, up to 1.
        apart: the bytes that are moved before or after its products, not during them.
        calls: host time of a call, in calls of PyTorch operations, where it is unusual.
        dtype: the name of the dtype that its products read, where it is not the op's.
        sent: bytes that this rank sends to others.
        ranks: the number of ranks that communicate.
        beside: the share of the communication that overlaps with the rest of the step.
        hidden: the share of it that overlaps with other steps.
    """

    read: float = 0.0
    written: float = 0.0
    flops: float = 0.0
    launches: int = 1
    vector_operations: float = 0.0
    seconds: float | None = None
    efficiency: float = 1.0
    apart: float = 0.0
    calls: float | None = None
    dtype: str | None = None
    sent: float = 0.0
    ranks: int = 1
    beside: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        known = self.seconds is not None or other.seconds is not None
        return Cost(
            self.read + other.read,
            self.written + other.written,
            self.flops + other.flops,
            self.launches + other.launches,
            self.vector_operations + other.vector_operations,
            (self.seconds or 0.0) + (other.seconds or 0.0) if known else None,
            min(self.efficiency, other.efficiency),
            self.apart + other.apart,
            (self.calls or 0.0) + (other.calls or 0.0) if (self.calls, other.calls) != (None, None) else None,
            self.dtype or other.dtype,
            self.sent + other.sent,
            max(self.ranks, other.ranks),
            self._of_sent(other, "beside"),
            self._of_sent(other, "hidden"),
        )

    def _of_sent(self, other: Cost, name: str) -> float:
        """The mean of a share of the sending."""
        shares = self.sent * getattr(self, name) + other.sent * getattr(other, name)
        return shares / (self.sent + other.sent or 1.0)  # type: ignore[no-any-return]


_NUMBERS = tuple(f.name for f in fields(Cost) if f.name != "dtype")


def costs_in(found: Any) -> Iterator[Any]:
    """The costs in what says several: in a tuple of them, which may hold tuples."""
    for c in found if isinstance(found, tuple) else (found,):
        yield from costs_in(c) if isinstance(c, tuple) else (c,)


def why_no_cost(found: Any) -> str | None:
    """Reason why something is no cost of a match; costs and None are."""
    if found is None:
        return None
    if not isinstance(found, Cost):
        hint = f"Cost(seconds={found!r})" if isinstance(found, (int, float)) else "fusions.Cost(...)"
        return f"{type(found).__name__}, not a Cost; write {hint}"
    for name in _NUMBERS:
        number = getattr(found, name)
        if name in ("seconds", "calls") and number is None:
            continue
        if not isinstance(number, (int, float)) or not 0 <= number < math.inf or name == "efficiency" and not number:
            return f"a Cost of {name}={number!r}, which nothing takes; `when` refuses a match"
    return None


@dataclass(frozen=True)
class ByBlocks:
    """Another way to run a body: with a tensor by blocks in the place of its rows, where a generated kernel has these.

    Attributes:
        name: the tensor, "input", or in backward "dy".
        layouts: in which it is taken, as "input.blocks", of those of `codegen.description.Store`.
        function: what runs then: of the same tensors, but for these.
        needs: the gradients without which it is not worth it.
    """

    name: str
    layouts: tuple[Layout, ...]
    dtype: torch.dtype
    function: Callable[..., Any]
    cost: Callable[[Match], Cost] = field(compare=False)
    written: tuple[WrittenKernel, ...] = ()
    needs: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensor, one for each layout."""
        return tuple([f"{self.name}.{layout}" for layout in self.layouts])


class InBlocks(NamedTuple):
    """Gradients that a body can give by blocks: their names, the 8 bits, and how they then lie."""

    names: tuple[str, ...]
    dtype: torch.dtype
    layouts: tuple[Layout, ...] = ("blocks", "transposed_blocks")


@dataclass(frozen=True)
class Body:
    """Function that a fusion's `choose` returns for a match, and promises about it.

    Attributes:
        plain: True promises that it returns new memory, keeps no reference to its inputs, and uses only the current
            stream.
        by_rows: True for a native product's `make` of which each row depends on one row of its first tensor.
        describe: returns a text on the algorithm for explain(), empty while it is not known.
        transposed: of a backward with one step, the gradients that it can also return transposed: "input", as
            "input.transposed" where `m.needs("input.transposed")`.
        by_blocks: the function for a tensor in blockwise 8 bits.
        in_blocks: of a backward with one step, the gradients that it can return in blockwise 8 bits in place of rows:
            where `m.needs("input.blocks")`, it returns that and "input.transposed_blocks".
    """

    function: Callable[..., Any]
    plain: bool = False
    by_rows: bool = False
    describe: Callable[[], str] | None = field(default=None, compare=False)
    transposed: tuple[str, ...] = ()
    by_blocks: ByBlocks | None = None
    in_blocks: InBlocks | None = None


class MatchedOp:
    """One matched op while planning: its attributes, and its parameters; those that are computed have no values.

    Attributes:
        looked: whether somebody may have seen a parameter: else what was said of this op holds for all that are alike.
    """

    def __init__(
        self,
        op: FusableOperation,
        parameters: Mapping[str, Callable[[], torch.Tensor]],
        dtypes: Mapping[str, torch.dtype] | None = None,
        inputs: Mapping[str, Spec] | None = None,
        own: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        self._op, self._parameters, self._dtypes, self._own = op, parameters, dtypes or {}, own or {}
        self.inputs = inputs or {}  # argument -> what is known of a named input that is given
        self.looked = False

    @property
    def op(self) -> FusableOperation:
        """The op itself, which has its parameters."""
        self.looked |= bool(self._parameters)
        return self._op

    @property
    def kind(self) -> type[FusableOperation]:
        """The class that the op is matched as."""
        return self._op.kind

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype in which a parameter or named input is read, maybe cast by autocast."""
        return self._dtypes[name]

    def own_dtype_of(self, name: str) -> torch.dtype:
        """The dtype that a parameter has, whatever it is read in."""
        return self._own[name]

    def reads(self, name: str) -> bool:
        """True where the op has such a parameter or named input."""
        return name in self._dtypes

    def __getattr__(self, name: str) -> Any:
        self.looked |= bool(self._parameters) and name not in vars(self._op)
        parameter = self._parameters.get(name)
        return parameter() if parameter is not None else getattr(self._op, name)


@dataclass(frozen=True)
class Match:
    """A place in the list where a pattern matches: ops, shapes and dtypes, while planning.

    Attributes:
        ops: the matched ops; `match[k].weight`, `match[k].eps` reach their parameters and attributes.
        x: shape, dtype and device of the input; `y`: of the output; `dy`: of its gradient, None without one. `when` is
            called once for all shapes with the same results of its comparisons; `cost` gets sizes rounded up to powers
            of two.
        target: how row ops run: "cpp", "cuda" (generated) or "torch" (PyTorch operations).
        capability: the compute capability of a GPU that is planned for by name, else None.
    """

    ops: Sequence[MatchedOp]
    x: Spec
    y: Spec
    target: str = "torch"
    needs_grad: bool = False
    capability: tuple[int, int] | None = None
    dy: Spec | None = None

    def __getitem__(self, index: int) -> MatchedOp:
        return self.ops[index]

    def __len__(self) -> int:
        return len(self.ops)

    def exact(self) -> Match:
        """Copy of the match with plain sizes."""
        return replace(self, x=self.x.exact(), y=self.y.exact(), dy=self.dy and self.dy.exact())

    def rounded(self) -> Match:
        """Copy of the match with sizes rounded up to powers of two, as `cost` gets them."""
        return replace(self, x=self.x.rounded(), y=self.y.rounded(), dy=self.dy and self.dy.rounded())

    @property
    def kernels(self) -> str:
        """`target`, by its former name."""
        warnings.warn("Match.kernels is called Match.target now", DeprecationWarning, stacklevel=2)
        return self.target

    def why_no_cuda(self) -> str | None:
        """Reason for which no CUDA kernel for the GPU at hand can run in this plan."""
        if self.device.type != "cuda":
            return f"it runs on cuda, the input is on {self.device.type}"
        if self.target != "cuda":
            return "it is a kernel that is compiled for the GPU at hand, and this plan is one without generated kernels"
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the input."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """The device of the input."""
        return self.x.device


class CalledOp:
    """A matched op while running: parameters and named inputs are tensors."""

    __slots__ = ("_index", "_tensors", "op")

    def __init__(self, op: FusableOperation, index: int, tensors: Mapping[str, torch.Tensor | None]) -> None:
        self.op, self._index, self._tensors = op, index, tensors

    def __getattr__(self, name: str) -> Any:
        key = f"{self._index}.{name}"
        return self._tensors[key] if key in self._tensors else getattr(self.op, name)


class FusionCall:
    """A fusion's view of one call.

    `m[k]` is op k of the match with its tensors; `m["input"]`, `m["0.output"]` and names saved by a joint fusion are
    the values in `reads`; `m.needs("0.weight")` is True if that gradient is needed.
    """

    __slots__ = ("_ops", "_tensors", "_needed", "_shared", "_streams", "made")

    def __init__(
        self,
        ops: Sequence[FusableOperation],
        tensors: Mapping[str, torch.Tensor | None],
        needed: frozenset[str],
        streams: Mapping[int, Callable[[], RandomStream]],
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self._ops, self._tensors, self._needed, self._streams = ops, tensors, needed, streams
        self._shared = shared
        self.made: dict[str, torch.Tensor] = {}

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, int):
            return CalledOp(self._ops[key], key, self._tensors)
        if key not in self._tensors:
            raise KeyError(f"{key!r} is not declared in reads, emits or saves (declared: {sorted(self._tensors)})")
        return self._tensors[key]

    def __len__(self) -> int:
        return len(self._ops)

    def needs(self, name: str) -> bool:
        """True where the gradient of "input", "k.parameter" or "k.named" is needed."""
        return name in self._needed

    def emit(self, name: str, tensor: torch.Tensor) -> None:
        """Give a value that the fusion declared in `emits` or `saves`."""
        self.made[name] = tensor

    def draws(self, index: int) -> bool:
        """True if op `index` draws random numbers in this plan, whatever its current training flag is."""
        return index in self._streams

    def drawing(self, index: int, device: torch.device) -> AbstractContextManager[None]:
        """Context in which PyTorch's generator is the one for a library that draws by itself for op `index`.

        Where ranks share what it draws for, each has a state of its own, of the draw that the call has made.
        """
        return own_state(self._streams[index], device) if index in self._shared else contextlib.nullcontext()

    def random(self, index: int) -> RandomStream:
        """The random stream of op `index`.

        Raises:
            KeyError: when it draws nothing as it is now.
        """
        if index not in self._streams:
            raise KeyError(f"op {index} of the match draws nothing as it is now; ask m[{index}].op.draws() first")
        return self._streams[index]()
