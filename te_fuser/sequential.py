"""Sequential: a list of ops that plans itself, with torch.nn.Sequential's list semantics; Residual: x + branch."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.compiler import is_compiling, is_dynamo_compiling

from te_fuser.distributed.placement import CALL, Entering, entering_now
from te_fuser.fake_tensors import NotSeenError, looking, stands_in
from te_fuser.flatten import ListOptions, OpList, flatten, qualified, runs_itself
from te_fuser.fused_regions import Border, FusedRegion, GroupRun, Part, walk_parts
from te_fuser.fuser.graph.op_instances import results_like
from te_fuser.fuser.graph.passes import PassRecord, record_passes
from te_fuser.fuser.pipeline import check_options
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.run.call import PLAIN, check_input, check_tensor, named_tensors, refuse_proxy
from te_fuser.fuser.run.delayed import backward_dw
from te_fuser.fuser.run.loading import unhooked
from te_fuser.fuser.show.measure import pythons_draws_undone, undisturbed
from te_fuser.guards import Facts, still_hold
from te_fuser.ops.base import FusableOperation, walk
from te_fuser.ops.hooks import GLOBAL_HOOKS, hook_facts, hooks_of, silenced
from te_fuser.params.main_grad import spared

if TYPE_CHECKING:
    from te_fuser.fuser.pipeline import Fuser
    from te_fuser.fuser.run.plan_cache import KeptPlan
    from te_fuser.fuser.tune.tune import TuneReport

# Whether PyTorch's compiler follows how a list is taken apart, which a reference does inside of what is compiled.
_FOLLOWED = torch.__version__ >= "2.13"


class Sequential(OpList):
    """Operations in order, fused where that pays: y = op_n(... op_1(x)).

    It has the list semantics of `torch.nn.Sequential`. Nested Sequentials are fused as if their ops stood in this
    list; plain modules and modules with hooks run by themselves and split the list into groups. A nested Sequential
    has the options of the list around it; one that was given another is planned by itself.

    Args:
        *ops: operations and modules, or one ordered dict of them.
        memory: "fast", "balanced" (the default) or "lean", or a budget in bytes: what is kept for backward (see
            `explain`).
        kernels: "auto" (the default: generated kernels where they can be had), "generated" (an error where they
            cannot) or "reference" (PyTorch operations).
        fallback: what "auto" does where generated kernels cannot be had: "warn" once (the default) and run
            PyTorch's, or raise an "error" that says what is missing.
        verify: check every fused step on the data it sees against float64; slow, raises when a step errs.

    Warns:
        UserWarning: once for each class of torch.nn that stands in a list although `from_torch` makes ops of it.

    Examples:
        >>> import torch, te_fuser
        >>> mlp = te_fuser.Sequential(te_fuser.ops.LayerNorm(8), te_fuser.ops.Linear(8, 32), te_fuser.ops.GELU())
        >>> mlp(torch.randn(4, 8)).shape
        torch.Size([4, 32])
    """

    flattens: ClassVar[bool] = True  # of this class's forward: a subclass that defines another says it of its own

    def __init__(
        self,
        *ops: Any,
        memory: str | int | None = None,
        kernels: str | None = None,
        fallback: str | None = None,
        verify: bool | None = None,
    ) -> None:
        super().__init__(*ops)
        self._given, self._around = ListOptions(), ListOptions()
        self.memory, self.kernels, self.fallback, self.verify = memory, kernels, fallback, verify
        check_options(self.memory, self.kernels, self.fallback)
        if not isinstance(self.verify, bool):
            raise TypeError(f"verify is True or False, got {verify!r}")
        self._structure: _Structure | None = None
        _say_what_is_plain(self)

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold locks and kernels: a copy and a pickle of the model make their own.
        return {**self.__dict__, "_given": ListOptions(self._given), "_around": ListOptions(), "_structure": None}

    # ------------------------------------------------------------------------------ list semantics

    def _like(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> Sequential:
        return Sequential(OrderedDict((name, m) for name, m in modules if m is not None), **self._given)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._like(list(self._modules.items())[index])  # type: ignore[arg-type]
        return super().__getitem__(index)

    def insert(self, index: int, module: torch.nn.Module) -> Sequential:
        """Insert a module; those behind it move by one.

        Raises:
            TypeError: when it is no module.
            ValueError: when those have names, which cannot move.
        """
        self._check_module(module)
        first = index + len(self) if index < 0 else index
        named = [name for k, name in enumerate(self._modules) if k >= first and name != str(k)]
        if named:
            kind = type(self).__name__
            raise ValueError(
                f"insert moves what is behind by its number, and in this {kind} that has names ({', '.join(named)}): "
                f"make a list around it, te_fuser.Sequential(op, ...), or a new one of an OrderedDict of all its ops"
            )
        return super().insert(index, module)

    def __add__(self, other: torch.nn.Sequential) -> Sequential:
        if not isinstance(other, torch.nn.Sequential):
            raise TypeError(f"Sequential adds another Sequential, got {type(other).__name__}")
        return self._like((str(k), m) for k, m in enumerate([*self, *other]))

    def __mul__(self, times: int) -> Sequential:
        if not isinstance(times, int) or times <= 0:
            raise ValueError(f"Sequential can be repeated 1 or more times, got {times!r}")
        return self._like((str(k), m) for k, m in enumerate(list(self) * times))

    __rmul__ = __mul__

    # ------------------------------------------------------------------------------------- running

    def forward(self, x: torch.Tensor, *, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> Any:  # type: ignore[override]
        """Run the list forward: y = op_n(... op_1(x)).

        Args:
            x: [..., features].
            outputs: names of `Output`s to return beside the result, in this order.
            **inputs: the tensors that ops read by name.

        Returns:
            y, or (y, *outputs).

        Raises:
            TypeError, ValueError: when the input does not fit the list, naming op, position, and what to do.
        """
        if is_compiling():
            from te_fuser.fuser.run.dynamo_break import outside_tracing

            return outside_tracing(Sequential._run, self, x, outputs, inputs)
        structure, y = self._structure, None
        if type(outputs) is not tuple or CALL.module is self:  # of tracers they are none
            structure = None
        if structure is not None and structure.alone is not None:
            asked, wanted = structure.asked[0] if outputs else (outputs, ())
            if asked == outputs:
                y = structure.alone.again(x, inputs, wanted)  # which looks whether the structure is that still
        return self._run(x, outputs, inputs) if y is None else y

    def _run(self, x: torch.Tensor, outputs: Sequence[str], inputs: Mapping[str, torch.Tensor]) -> Any:
        if type(x) not in PLAIN:
            refuse_proxy(x)
        structure = self._current()
        wanted = self._wanted(outputs) if outputs else ()
        if structure.alone is not None:
            if outputs:
                structure.asked[0] = tuple(outputs), wanted
            return structure.alone.run(x, inputs, wanted)
        return walk_parts(structure.parts, x, named_tensors(inputs), wanted, _run_group)

    def _wanted(self, outputs: Sequence[str]) -> tuple[str, ...]:
        if isinstance(outputs, str):
            raise TypeError(f"outputs is a sequence of names, got {outputs!r}; write outputs=({outputs!r},)")
        parts = self._prepared()
        return tuple(qualified(parts, name) for name in outputs)

    # ----------------------------------------------------------------------------------- structure

    def _prepared(self) -> list[Part]:
        if is_compiling():  # of the reference, into which compilers look; they see no native code
            if is_dynamo_compiling() and not _FOLLOWED:
                raise NotImplementedError(
                    "torch.compile(fullgraph=True) and torch.export.export(strict=True) of a reference need PyTorch "
                    "2.13; leave fullgraph away, export with strict=False"
                )
            return flatten(self, entering=entering_now(self))
        return self._current().parts

    def _current(self) -> _Structure:
        found: _Structure | None = self._structure
        if found is None or found.entering != entering_now(self) or not still_hold(found.facts):
            found = self._structure = _structure_of(self)
        return found

    # ------------------------------------------------------------------------------- looking inside

    def plan(self, x: torch.Tensor, *, outputs: Sequence[str] = (), device: Any = None, **inputs: torch.Tensor) -> Plan:
        """Plan of such a call, as data; nothing runs.

        Raises:
            ValueError: when plain modules split the list into several plans; see `plans`.
        """
        found = Sequential.plans(self, x, outputs=outputs, device=device, **inputs)  # a preset's takes its calls
        if len(found) != 1:
            by_options = any(part.notes for part in self._prepared() if isinstance(part, FusedRegion))
            what = "plain modules and lists with other options" if by_options else "plain modules"
            raise ValueError(f"{what} split this list into {len(found)} plans; use plans(x)")
        return found[0]

    def plans(
        self, x: torch.Tensor, *, outputs: Sequence[str] = (), device: Any = None, **inputs: torch.Tensor
    ) -> list[Plan]:
        """Plans of such a call, one for each group of ops between plain modules; nothing runs.

        The output shape of a plain module comes from its last call, if that was like this one, or from a copy of it
        that runs on fake tensors, without hooks.

        Raises:
            NotSeenError: a ValueError, where only a real call can tell the shape.
        """
        found, unseen = self._looked_at(x, outputs, device, inputs)
        if unseen is not None:
            raise unseen
        return found

    def _looked_at(
        self,
        x: torch.Tensor,
        outputs: Sequence[str],
        device: Any,
        inputs: Mapping[str, torch.Tensor],
        passes: list[list[PassRecord]] | None = None,
    ) -> tuple[list[Plan], NotSeenError | None]:
        """The plans, why one is missing, and into `passes` the changes by passes."""
        from te_fuser.fuser.plan.device import Device, device_named

        roofline = device if device is None or isinstance(device, Device) else device_named(device)
        parts, wanted, values, found = self._prepared(), self._wanted(outputs), named_tensors(inputs), list[Plan]()

        def run(group: FusedRegion, x: torch.Tensor, given: Mapping[str, torch.Tensor], wanted: tuple[str, ...]) -> Any:
            with contextlib.nullcontext(list[PassRecord]()) if passes is None else record_passes() as records:
                found.append(group.noted(group.fuser.plan(x, given, wanted, roofline)))
            if passes is not None:
                passes.append(records)
            return results_like(found[-1].graph, wanted, x.device) if len(parts) > 1 else None

        if type(parts[0]) is FusedRegion:
            check_input(x, planning=roofline is not None)
        try:
            if len(parts) == 1 and isinstance(parts[0], FusedRegion):
                parts[0].run(run, x, values, wanted)
            else:
                with looking() as look, pythons_draws_undone():
                    walk_parts(parts, look.of(x), look.of(values), wanted, run, Border.looked_at)
        except NotSeenError as error:
            return found, error
        return found, None

    def backward_dw(self) -> None:
        """Compute the gradients of weights that the oldest backward left: see `te_fuser.parallel.backward_dw`."""
        backward_dw(self)

    def plans_kept(self) -> list[KeptPlan]:
        """Plan cache: the plans that calls have made, the last used first.

        A shape reuses a plan if all conditions on sizes have the same results, and its sizes have the same powers of
        two. `te_fuser.config.plans_kept` limits the plans of each group of ops. Modules that run by themselves have
        their own.
        """
        return [kept for part in self._prepared() if isinstance(part, FusedRegion) for kept in part.fuser.plans_kept()]

    def explain(
        self,
        x: torch.Tensor | None = None,
        *,
        device: str | None = None,
        source: bool = False,
        measure: bool = False,
        passes: bool = False,
        details: bool = False,
        outputs: Sequence[str] = (),
        **inputs: torch.Tensor,
    ) -> Any:
        """Both plans as a table of steps with their predicted time.

        Args:
            x: an input with the shape, dtype and requires_grad of the calls to explain; with `device` it may be on the
                meta device.
            device: name of a device to plan for, e.g. "h200"; by default the device of x.
            source: show the generated code too.
            measure: run the call a few times, forward and backward, and show measured beside predicted times.
            passes: show the changes of each planning pass, and the pass that made each step.
            details: show bytes, the tensors that each step keeps, and why fusions were not taken, too.

        Returns:
            An object that prints as text (`print(model.explain(x))`); `.plans` holds the data.

        Raises:
            ValueError: for `measure` on a device that is only named.
        """
        from te_fuser.fuser.show.explain import Explanation

        if x is None:
            raise TypeError("explain(x) needs an input like those of your calls; torch.empty of its shape will do")
        records: list[list[PassRecord]] | None = [] if passes else None
        if measure and device is not None:
            raise ValueError(f"measure=True runs on the device at hand; leave out device={device!r}")
        plans, times = self._measured(x, outputs, inputs) if measure else ([], [])
        seen, unseen = self._looked_at(x, outputs, device, inputs, records) if passes or not measure else ([], None)
        unknown = "" if unseen is None or measure else str(unseen)
        found = plans if measure else seen
        return Explanation(found, source, times, unknown, _borders(self._prepared()), records or (), details)

    def _measured(
        self, x: torch.Tensor, outputs: Sequence[str], inputs: Mapping[str, torch.Tensor]
    ) -> tuple[list[Plan], list[Any]]:
        """The plan of each group of ops between plain modules, and its times."""
        from te_fuser.fuser.show.measure import measured_run

        plans, times = list[Plan](), list[Any]()

        def run(group: FusedRegion, *call: Any) -> Any:
            plan, taken, made = measured_run(group.fuser, *call)
            plans.append(group.noted(plan))
            times.append(taken)
            return made

        self._try(run, x, outputs, inputs)
        return plans, times

    def tune(
        self,
        x: torch.Tensor,
        *,
        outputs: Sequence[str] = (),
        rounds: int = 7,
        seconds: float = 0.2,
        margin: float = 0.005,
        **inputs: torch.Tensor,
    ) -> TuneReport:
        """Measure alternatives in this model on this device, and use the faster ones from now on.

        Each fusion that matches somewhere is tried where the plan does not have it, and left out where it has it,
        forward and backward together, in alternating rounds; on a GPU then other schedules of generated kernels and
        other algorithms of products. An alternative with other outputs or gradients is refused, with the reason in the
        report. Choices are stored on disk, fusions for this list of ops, device and number of rows (by power of two),
        and hold for later processes.

        Args:
            x: an input like those of later calls; backward is measured for tensors that require a gradient.
            outputs: names of `Output`s, as in the calls to come.
            rounds, seconds: the number of turns of each of two plans, and the duration of a turn in seconds.
            margin: the share of the time that a choice must gain to be taken.
            **inputs: the tensors that ops read by name.

        Returns:
            The alternatives with their times; prints as a table.

        Raises:
            OSError: before anything is measured, when the cache folder cannot be written.
        """
        from te_fuser.fuser.tune.tune import Effort, TuneReport, tune

        effort = Effort(rounds, seconds, margin)
        reports = []

        def run(group: FusedRegion, x: torch.Tensor, given: Mapping[str, torch.Tensor], wanted: tuple[str, ...]) -> Any:
            report, made = tune(group.fuser, x, given, wanted, effort)
            reports.append(report)
            return made

        self._try(run, x, outputs, inputs)
        return TuneReport.of(reports)

    def _try(self, run: GroupRun, x: torch.Tensor, outputs: Sequence[str], inputs: Mapping[str, torch.Tensor]) -> None:
        """Walk through the parts with `run`, and leave the model as it was."""

        def checked(
            group: FusedRegion, x: torch.Tensor, given: Mapping[str, torch.Tensor], wanted: tuple[str, ...]
        ) -> Any:
            check_input(x)
            with spared(self.parameters()):
                return run(group, unhooked(x), {name: unhooked(t) for name, t in given.items()}, wanted)

        with undisturbed(self, x), silenced(self):
            walk_parts(self._prepared(), x, named_tensors(inputs), self._wanted(outputs), checked, Border.tried)

    def reference(self, x: torch.Tensor, *, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> Any:
        """Compute the same result op by op, in plain differentiable PyTorch operations.

        Plain modules between ops are called as in forward, with their hooks.
        """
        if type(self._prepared()[0]) is FusedRegion:
            check_tensor(x)
        for name, t in inputs.items():
            if t is not None:
                check_tensor(t, f" as its input {name!r}")
        return walk_parts(self._prepared(), x, inputs, self._wanted(outputs), FusedRegion.reference)

    def operations(self) -> list[FusableOperation]:
        """All ops in this list and in nested ones."""
        return list(walk(self))


class Residual(Sequential):
    """A branch and its sum: y = x + op_n(... op_1(x)).

    Raises:
        ValueError: when the branch changes the shape (found at the first call).

    Source: He et al., "Deep residual learning for image recognition" (2015).
    """

    adds_input: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class _Structure:
    """Parts that a list comes to, and the facts by which it is known to be that still.

    It is an object, as torch.export leaves copies of a module's attributes that are tuples, lists or dicts.
    """

    facts: Facts
    parts: list[Part]
    alone: Fuser | None  # where one plan is all
    asked: list[Any]  # one pair: the outputs that a call named last, and their names here
    entering: Entering  # what is known of what ranks have before it


def _structure_of(model: Sequential) -> _Structure:
    containers = [m for m in model.modules() if isinstance(m, Sequential)]
    lists = [c._modules for c in containers]  # not the containers: the model would hold itself
    watched = [m for modules in lists for m in modules.values() if m is not None]
    inner = [vars(m) for m in watched if isinstance(m, Sequential)]  # a forward or a class may be put there later
    options = [model._around, *(c._given for c in containers)]
    lists_as_they_are = Facts(
        members=tuple([(modules, tuple(dict.values(modules))) for modules in lists]),
        items=tuple([(own, name, own.get(name)) for own in inner for name in ("forward", "revision")]),
        pairs=tuple([(o, dict(o)) for o in options]),
    )
    hooks = hook_facts([*GLOBAL_HOOKS, *(h for m in watched for h in hooks_of(m))])
    facts = Facts.of([lists_as_they_are, hooks, *[m.facts() for m in watched if isinstance(m, FusableOperation)]])
    entering = entering_now(model)
    parts = flatten(model, facts, entering)
    first = parts[0]
    plain = len(parts) == 1 and isinstance(first, FusedRegion) and not (first.verify or first.held or entering)
    return _Structure(facts, parts, first.fuser if plain else None, [((), ())], entering)  # type: ignore[union-attr]


def _run_group(group: FusedRegion, x: torch.Tensor, given: Mapping[str, torch.Tensor], asked: tuple[str, ...]) -> Any:
    if not group.verify or stands_in(x):
        return group.fuser.run(x, given, asked)
    from te_fuser.verify import run_verified

    return run_verified(group.fuser, x, given, asked)


_said: set[type] = set()  # classes that were warned of


def _say_what_is_plain(model: Sequential) -> None:
    """Warn, once a class, of plain modules in a list for which ops could stand."""
    from te_fuser.from_torch import why_none

    plain = {name: m for name, m in model.members() if not isinstance(m, (FusableOperation, OpList))}
    new = {name: type(m) for name, m in plain.items() if type(m) not in _said and not why_none(m)}
    if new:
        _said.update(new.values())
        named = ", ".join(f"{name} ({kind.__name__})" for name, kind in new.items())
        warnings.warn(
            f"te_fuser.Sequential fuses ops, and runs {named} of this list as they are: make the list by "
            "te_fuser.from_torch(torch.nn.Sequential(...)), or put te_fuser.from_torch(module) in the place of each. "
            "This is said once for each class",
            stacklevel=3,
        )


def _borders(parts: Iterable[Part]) -> list[tuple[int, str]]:
    """Modules that run by themselves, and why, with the plans before them; alike ones in a row."""
    from te_fuser.from_torch import why_none

    found: list[tuple[int, str, list[str]]] = []
    plans = 0
    for part in parts:
        if isinstance(part, FusedRegion):
            plans += 1
            continue
        module, why = part.module, runs_itself(part.module)
        if hasattr(module, "by_itself"):  # of converted models
            why = str(module.by_itself)
        elif not isinstance(module, (FusableOperation, OpList)):
            none = why_none(module)
            made = f"makes none of it: {none}" if none else "makes ops of it, with its parameters"
            why = f"{why}; te_fuser.from_torch(module) {made}"
        if not found or found[-1][:2] != (plans, why):
            found.append((plans, why, []))
        found[-1][2].append(f"{part.path} ({type(module).__name__})")
    return [(before, f"By itself, fused with nothing: {', '.join(names)}: {why}") for before, why, names in found]
