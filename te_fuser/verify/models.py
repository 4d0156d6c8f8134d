"""Running one model in one case, fused and as its reference, and comparing all that comes out."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from te_fuser.compare import UPSTREAM, Row, Tensors, judge, same_bits
from te_fuser.distributed.consistency import RankMismatchError, gather_values
from te_fuser.distributed.dtensor import is_dtensor, own_part
from te_fuser.distributed.group import Group as RankGroup
from te_fuser.dtypes import FLOAT8, FLOATING
from te_fuser.fake_tensors import NotSeenError
from te_fuser.flatten import exported
from te_fuser.formula.evaluate import unrounded
from te_fuser.formula.expr import Axes
from te_fuser.formula.float8 import ties_turned
from te_fuser.fused_regions import FusedRegion, walk_parts
from te_fuser.fuser.graph.op_instances import ListedOp, spec_of
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import registry
from te_fuser.ops import Bound, DotProductAttention, op_table
from te_fuser.ops.base import NamedInput, Spec, output_specs
from te_fuser.ops.operations import marked_parameters
from te_fuser.ops.row_op import RowOp
from te_fuser.sequential import Sequential
from te_fuser.sharding.rules import rule_of
from te_fuser.verify.examples import LAYOUTS, Case
from te_fuser.verify.report import TELL
from te_fuser.verify.steps import memory_of, run_watched

_INPUT, _PARAMETER, _BUFFER, _GRADIENT = "input", "parameter ", "buffer ", "gradient of "


@dataclass
class VerifiedCall:
    """Arguments of a model's call; gradients of `differentiable` ones are compared."""

    x: torch.Tensor
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    differentiable: frozenset[str] = frozenset()

    def to(self, dtype: torch.dtype | None) -> VerifiedCall:
        """Copy with every floating-point tensor in `dtype`, if one is given."""
        if dtype is None:
            return self

        def cast(t: torch.Tensor) -> torch.Tensor:
            return t.to(dtype) if t.dtype in FLOATING.values() else t

        return replace(self, x=cast(self.x), inputs={name: cast(t) for name, t in self.inputs.items()})


class Subject:
    """A model under verification: a fused copy, and one that runs its reference."""

    def __init__(
        self,
        model: Sequential,
        dtype: torch.dtype | None,
        device: torch.device | None = None,
        ranks: Sequence[RankGroup] = (),
    ) -> None:
        self._ranks = ranks
        whole = with_owners(model)
        self.owned = copy.deepcopy(whole).to(device, dtype)
        for module in self.owned.modules():
            for name, p in [*module._parameters.items()]:
                if p is not None and is_dtensor(p):  # plain parameters: this rank's part
                    module.register_parameter(name, torch.nn.Parameter(own_part(p.detach()), p.requires_grad))
        self.fused = _list_of(self.owned)
        for module in self.fused.modules():
            if isinstance(module, Sequential):
                module.verify = False
                if dtype == torch.float64 and module.kernels == "generated":
                    module.kernels = "auto"  # none are generated for float64, and formulas are worth a look
        self.meant = copy.deepcopy(self.owned)
        self.meaning = _list_of(self.meant)
        self.trainable = tuple(name for name, p in whole.named_parameters() if p.requires_grad)
        self.modes = {name: m.training for name, m in model.named_modules()}
        for item in listed_ops(self.fused):
            for name in marked_parameters(item.lowered.op, tuple(item.lowered.bindings)):
                for marked in item.lowered.bindings[name].parts():
                    marked.main_grad = torch.zeros_like(marked)  # type: ignore[attr-defined]

    def check(self, case: Case, call: VerifiedCall) -> list[Row]:
        """One row for each result of the case, and for each promise that is not about accuracy.

        Of other ranks that run it together there is a row for what fails.
        """
        TELL.get()(case.name)
        if case.negated:
            self._negate()
        try:
            with registry.disabled(registry.RECORDED):
                rows = _Run(self, case, call).rows()
            # Where so small a call would run as PyTorch's functions, by these, too.
            rows += _Run(self, case, call).rows() if self._records(call) else []
        finally:
            if case.negated:
                self._negate()
        if not self._ranks:
            return rows
        failed = gather_values(self._ranks, f"verify: {case.name}", [str(row) for row in rows if not row.passed])
        others = [(k, text) for k, texts in enumerate(failed) for text in texts]
        return rows + [Row(case.name, "another rank", note=f"on rank {k}: {text}") for k, text in others]

    def settled(self, settled: bool) -> bool:
        """True where all ranks are settled; else all of them together have to look at other data."""
        return all(gather_values(self._ranks, "verify: whether to run on neighbouring data", settled))

    def _negate(self) -> None:
        """Change all parameters in place, as some optimizers do: no version counter sees it."""
        for p in self.owned.parameters():
            if p.dtype in FLOAT8.values():
                p.data.view(torch.uint8).bitwise_xor_(0x80)
            else:
                p.data.neg_()

    def _records(self, call: VerifiedCall) -> bool:
        """True where a part of the model would run as PyTorch's functions."""
        if not registry.enabled(registry.RECORDED):
            return False
        x = call.x.detach().requires_grad_(call.x.is_floating_point())
        try:
            plans = self.fused.plans(x, outputs=call.outputs, **call.inputs)
        except NotSeenError:  # a plain module looks at values: run it, whatever there is behind it
            return True
        return any(segment.recorded for plan in plans for segment in plan.segments)

    def plan(self, case: Case, call: VerifiedCall) -> Plan:
        """The plan that the case runs by, of a model without plain modules."""
        return _Run(self, case, call).plan()


class _Run:
    """One case of one subject."""

    def __init__(self, subject: Subject, case: Case, call: VerifiedCall) -> None:
        self.subject, self.case, self.call = subject, case, call
        self.wanted = self._wanted()
        self.data = {_INPUT: LAYOUTS[case.layout](call.x.detach())}
        self.data |= {f"{_INPUT} {name}": t.detach() for name, t in call.inputs.items()}
        self.data |= {_PARAMETER + name: p.detach().clone() for name, p in subject.owned.named_parameters()}
        self.data |= {_BUFFER + name: b.detach().clone() for name, b in subject.owned.named_buffers()}
        self.upstream: dict[str, torch.Tensor] = {}
        self.drawn: dict[str, torch.Tensor] = {}  # the same, where nobody writes

    def _wanted(self) -> list[str]:
        """The data whose gradients are compared."""
        parameters = [_PARAMETER + name for name in self.subject.trainable]
        named = [f"{_INPUT} {name}" for name in self.call.inputs if name in self.call.differentiable]
        floating = [_INPUT] if self.call.x.is_floating_point() else []
        everything = [*floating, *named, *parameters]
        groups = {"none": everything, "input": [*named, *parameters], "parameters": [*floating, *named], "all": []}
        if isinstance(self.case.frozen, frozenset):
            return [name for name in everything if name.removeprefix(_PARAMETER) not in self.case.frozen]
        return groups.get(self.case.frozen, [_PARAMETER + self.case.frozen.removeprefix("all but ")])

    def plan(self) -> Plan:
        model = self.subject.fused
        self._set_modes()
        leaves = self._fused_leaves()
        (group,) = model._prepared()
        names = model._wanted(self.call.outputs)
        assert isinstance(group, FusedRegion)
        inputs = {n: leaves[f"{_INPUT} {n}"] for n in self.call.inputs}
        return group.fuser.prepare(leaves[_INPUT], inputs, names)[0].plan

    def rows(self) -> list[Row]:
        try:
            with torch.random.fork_rng(devices=[]):
                return self._checked()
        except RankMismatchError:
            raise
        except Exception as error:
            return [Row(self.case.name, "the run", note=f"raises {type(error).__name__}: {error}")]

    def _checked(self) -> list[Row]:
        self._set_modes()
        before = {name: t.clone() for name, t in self.data.items()}
        leaves = self._fused_leaves()
        found, backward = self._results(self.subject.fused, leaves)
        # A second backward and a second run must give the same.
        again = [*backward().items(), *self._results(self.subject.fused, leaves)[0].items()]
        broken = self._watched()
        changed = [n for n, t in before.items() if not n.startswith(_BUFFER) and not same_bits(t, self._now(n))]
        changed += [f"gradient that came for {n}" for n, t in self.drawn.items() if not same_bits(t, self.upstream[n])]
        differing = [n for n, t in again if not same_bits(t, found[n])]
        if not gradients_repeat(self.subject.fused, self.call.x.device):
            differing = [n for n in differing if not n.startswith(_GRADIENT)]
        notes = [(name, "was changed by the run") for name in changed]
        notes += [(name, "is not repeated bit for bit") for name in differing]
        notes += [(name, "lies in the memory of an earlier call's") for name in self._reused(found, again)]
        notes += [("a step", what) for what in broken]
        rows = [Row(self.case.name, name, note=note) for name, note in dict.fromkeys(notes)]
        given = {op.output_dtype(torch.float32) for op in self.subject.fused.operations() if isinstance(op, RowOp)}
        turned = None if given.isdisjoint(FLOAT8.values()) else self._turned
        data, coarsest = {**before, **self.drawn}, self._coarsest(given)
        how: dict[str, Any] = {"coarsest": coarsest, "turned": turned, "settled": self.subject.settled}
        return rows + judge(self.case.name, found, data, self._reference, **how)

    def _coarsest(self, given: set[torch.dtype]) -> float:
        """The eps of the narrowest dtype that an op gives."""
        dtypes, kind = given & {*FLOATING.values()}, self.call.x.device.type
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        return max((torch.finfo(dtype).eps for dtype in dtypes - {torch.float32}), default=0.0)

    def _turned(self, data: Tensors) -> dict[str, torch.Tensor]:
        """The exact results with ties of 8 bits rounded the other way."""
        with ties_turned():
            return self._reference(data, True)

    def _now(self, name: str) -> torch.Tensor:
        parameters = dict(self.subject.owned.named_parameters())
        kind = name.removeprefix(_PARAMETER)
        return parameters[kind] if name.startswith(_PARAMETER) else self.data[name]

    def _set_modes(self) -> None:
        for model in (self.subject.fused, self.subject.meaning):
            for name, module in model.named_modules():
                module.training = self.subject.modes[name] != self.case.other_mode

    # ------------------------------------------------------------------------------------- running

    def _watched(self) -> list[str]:
        """Promises that steps do not keep, found in a run of its own."""
        model, said = self.subject.fused, list[str]()

        def run(group: FusedRegion, x: torch.Tensor, given: Tensors, wanted: tuple[str, ...]) -> Any:
            return run_watched(group.fuser, x, given, wanted, said)

        def watched(x: torch.Tensor, outputs: tuple[str, ...], **named: torch.Tensor) -> Any:
            return walk_parts(model._prepared(), x, named, model._wanted(outputs), run)

        self._results(watched, self._fused_leaves())
        return said

    def _reused(self, found: Tensors, again: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """The results whose memory a later call, or a second backward, gave out again."""
        given = {memory_of(t) for t in (*self.data.values(), *self.upstream.values())}
        given |= {memory_of(p) for p in self.subject.owned.parameters()}
        return [n for n, t in again if memory_of(t) == memory_of(found[n]) not in (None, *given)]

    def _fused_leaves(self) -> dict[str, torch.Tensor]:
        model = self.subject.owned
        for name, p in model.named_parameters():
            p.requires_grad_(_PARAMETER + name in self.wanted)
        leaves = self._leaves(self.data)
        return leaves | {_PARAMETER + name: p for name, p in model.named_parameters() if p.requires_grad}

    def _leaves(self, data: Tensors) -> dict[str, torch.Tensor]:
        return {
            name: t.detach().requires_grad_(name in self.wanted) for name, t in data.items() if name.startswith(_INPUT)
        }

    def _reference(self, data: Tensors, exact: bool) -> dict[str, torch.Tensor]:
        """The results of the reference on other data."""
        model, meant = self.subject.meaning, self.subject.meant
        for name, p in meant.named_parameters():
            p.data = data[_PARAMETER + name]
            p.requires_grad_(_PARAMETER + name in self.wanted)
        for name, b in meant.named_buffers():  # maybe of a first call in a region, after the data were taken
            b.data = data[_BUFFER + name].clone() if _BUFFER + name in data else b.data
        leaves = self._leaves(data)
        leaves |= {_PARAMETER + name: p for name, p in meant.named_parameters() if p.requires_grad}
        saved, self.upstream = self.upstream, {n: t for n, t in data.items() if n.startswith(UPSTREAM)}
        try:
            with unrounded() if exact else contextlib.nullcontext():
                return self._results(model.reference, leaves)[0]
        finally:
            self.upstream = saved

    def _results(
        self, function: Callable[..., Any], leaves: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], Callable[[], dict[str, torch.Tensor]]]:
        """Outputs and gradients by name, and a function that runs backward once more."""
        torch.default_generator.manual_seed(1)  # torch.manual_seed without the milliseconds that it takes
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(1)
        x = leaves[_INPUT]
        named = {name: leaves[f"{_INPUT} {name}"] for name in self.call.inputs}
        outputs: dict[str, torch.Tensor] = {}
        for number in range(self.case.calls):
            other = x if number == 0 or not x.is_floating_point() else x * 0.5  # ids stay ids
            made = function(other, outputs=self.call.outputs, **named)
            whole = made if isinstance(made, tuple) else (made,)
            mark = f" of call {number + 1}" if number else ""
            names = ("output", *(f"output {n!r}" for n in self.call.outputs))
            outputs |= {name + mark: y for name, y in zip(names, whole, strict=True)}
        arriving = {name: self._arriving(name, y) for name, y in outputs.items()}
        with_grad = [name for name, y in outputs.items() if y.requires_grad]

        def backward() -> dict[str, torch.Tensor]:
            wanted = {name: leaves[name] for name in self.wanted}
            main_grads = {name: leaf.main_grad.zero_() for name, leaf in wanted.items() if hasattr(leaf, "main_grad")}
            gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if wanted and with_grad:
                ends, grads = [outputs[n] for n in with_grad], [arriving[n] for n in with_grad]
                gradients = torch.autograd.grad(ends, list(wanted.values()), grads, True, allow_unused=True)
            found = {
                name: torch.zeros_like(leaf) if g is None else g
                for (name, leaf), g in zip(wanted.items(), gradients, strict=True)
            }
            found |= {name: found[name] + t for name, t in main_grads.items()}
            return {_GRADIENT + name.removeprefix(_PARAMETER): g for name, g in found.items()}

        return {name: y.detach() for name, y in outputs.items()} | backward(), backward

    def _arriving(self, name: str, y: torch.Tensor) -> torch.Tensor:
        """The gradient of an output, drawn once."""
        key = UPSTREAM + name
        if key not in self.upstream:
            rng = torch.Generator().manual_seed(len(self.upstream) + 7)
            drawn = torch.randn(y.shape, generator=rng, device=rng.device).to(y)
            self.upstream[key] = LAYOUTS[self.case.upstream](drawn)
            self.drawn[key] = self.upstream[key].clone()
        return self.upstream[key].to(y.dtype)


# ------------------------------------------------------------------------------------------ example inputs


def with_owners(model: Sequential) -> torch.nn.Module:
    """The model, beside it the modules outside of it whose parameters its ops read."""
    owners = [op.owner for op in model.modules() if isinstance(op, Bound)]
    outside = [owner for owner in dict.fromkeys(owners) if owner not in set(model.modules())]
    return torch.nn.ModuleList([model, *outside]) if outside else model


def _list_of(owned: torch.nn.Module) -> Sequential:
    found = owned if isinstance(owned, Sequential) else owned.get_submodule("0")
    assert isinstance(found, Sequential)
    return found


def listed_ops(model: Sequential) -> list[ListedOp]:
    """The model's ops in order, flattened; plain modules are left out."""
    return [item for part in model._prepared() for item in getattr(part, "listed", ())]


def example_call(
    model: Sequential, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> VerifiedCall:
    """An input of this shape, every named input that the ops read, and every output they name."""
    x = torch.randn(shape, generator=rng, device=rng.device).to(device, dtype)
    inputs: dict[str, torch.Tensor] = {}
    differentiable: set[str] = set()
    outputs: dict[str, None] = {}
    spec, bound, read = spec_of(x), set(), set()  # type: ignore[var-annotated]
    for item in listed_ops(model):
        op = item.lowered.op
        for argument, given in op.named_inputs().items():
            name = item.names_in[argument]
            read.add(name)
            if name in bound or name in inputs or given.optional:
                continue
            drawn = torch.randn(_shape(given, spec, op.batch_dim()), generator=rng, device=rng.device)
            inputs[name] = drawn.to(device, dtype)
            differentiable |= {name} if given.gradient else set()
        for one in (op,) if op.named_inputs() else rule_of(op).local_ops(op):  # which may exchange these, by names
            spec = output_specs(one, spec)["output"]
        bound |= set(item.names_out)
        outputs |= dict.fromkeys(item.names_out)
    # Forks that nobody closes are handed to the caller, as outputs are.
    leaving = {n for i in listed_ops(model) if op_table.exports.of(type(i.lowered.op)) for n in i.names_out}
    asked = [n for n in outputs if n in leaving or n not in read]
    return VerifiedCall(x, inputs, tuple(map(exported, asked)), frozenset(differentiable))


def _shape(given: NamedInput, x: Spec, batch_dim: int | None) -> tuple[int, ...]:
    samples = x.shape[batch_dim] if batch_dim is not None else 1
    shapes = {
        Axes.FULL: x.shape,
        Axes.ROWS: (*x.shape[:-1], 1),
        Axes.SAMPLE_FEATURES: (samples, x.shape[-1]),
        Axes.BATCH: (samples,),
        Axes.NONE: (),
    }
    if given.axes not in shapes:
        raise ValueError(f"verify cannot make up the input {given.name!r}: call verify(model, x, {given.name}=...)")
    return shapes[given.axes]


def gradient_names(model: Sequential, inputs: Iterable[str]) -> frozenset[str]:
    """The named inputs to which a gradient may flow."""
    found: set[str] = set()
    for item in listed_ops(model):
        found |= {item.names_in[a] for a, g in item.lowered.op.named_inputs().items() if g.gradient}
    return frozenset(found) & frozenset(inputs)


def gradients_repeat(model: Sequential, device: torch.device) -> bool:
    """True where a second backward gives the same bits; on a GPU attention does when asked to."""
    if device.type != "cuda" or torch.are_deterministic_algorithms_enabled():
        return True
    return not any(isinstance(op, DotProductAttention) for op in model.operations())


def first_features(model: Sequential, default: int) -> int:
    """The feature size that the first op which says one takes."""
    for item in listed_ops(model):
        op = item.lowered.op
        owners = ((op, "in_features"), (op, "features"), (getattr(op, "packed", None), "features"))
        bound = [binding.get() for binding in item.lowered.bindings.values()]
        sizes = (getattr(owner, name, None) for owner, name in owners)
        for size in (*sizes, *(t.shape[-1] for t in bound if t.dim())):
            if isinstance(size, int):
                return size
    return default
