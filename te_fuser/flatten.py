"""Flattening of a nested list of ops: into parts in a row, and the names that cross them.

Ops that are planned together are a group; a module that runs by its own __call__ is a border between groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from te_fuser.distributed.group import has_ranks
from te_fuser.distributed.placement import Entering
from te_fuser.fused_regions import Border, FusedRegion, Part, names_read
from te_fuser.fuser.graph.list_passes import with_placements
from te_fuser.fuser.graph.op_instances import ListedOp
from te_fuser.fuser.pipeline import Fuser
from te_fuser.guards import Facts
from te_fuser.ops import op_table
from te_fuser.ops.base import FusableOperation, LoweredOp
from te_fuser.ops.checks import TakesArguments, no_module
from te_fuser.ops.hooks import GLOBAL_HOOKS, hooks_of
from te_fuser.ops.structure import Add, Fork
from te_fuser.params.binding import Given

# Attributes of a list by which flattening goes; of another class its forward may be another one.
_DECIDING = frozenset({"__class__", "flattens", "adds_input", "shares_names", "runs_alone"})
_NO_FORWARD = torch.nn.Module.forward  # that of modules which only hold others


class ListOptions(dict[str, Any]):
    """Options of a list by name, held for it: of a plain dict torch.export makes copies."""


class Option:
    """Option of a list: its own value, else that of the list around, else `default`."""

    def __init__(self, default: Any) -> None:
        self.default = default

    def __set_name__(self, kind: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, kind: type | None = None) -> Any:
        return self if model is None else {**model._around, **model._given}.get(self.name, self.default)

    def __set__(self, model: Any, value: Any) -> None:
        model._given.pop(self.name, None)
        if value is not None:
            model._given[self.name] = value


class OpList(torch.nn.Sequential, TakesArguments):
    """List of ops, as far as flattening knows it.

    `flattens` promises, of the class that defines `forward`, that it only turns its call into x, named inputs and
    outputs: a list around takes the ops and does not run it. A forward whose class does not say so is run.
    """

    flattens: ClassVar[bool]
    adds_input: ClassVar[bool] = False  # whether the list's input is added to what its last op gives
    shares_names: bool = False  # whether names that its ops bind are those of the list around

    memory, kernels, fallback, verify = Option("balanced"), Option("auto"), Option("warn"), Option(False)
    runs_alone: bool = False  # whether it is run by its own __call__ whatever its class promises
    _structure: Any  # what the list came to
    _given: ListOptions
    _around: ListOptions  # the options of the list around, for one that runs by its own __call__ in there

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Add what can be called, as torch.nn.Module does; TypeError for None, which torch.nn.Sequential takes."""
        if module is None:
            kind = type(self).__name__
            raise TypeError(f"{kind} takes modules, got None as {name!r}: leave it out, or put ops.Identity() there")
        self._check_module(module)
        super().add_module(name, module)

    def _check_module(self, module: Any) -> None:
        """Refuse what no list can run; TypeError saying what to write."""
        runs = isinstance(module, torch.nn.Module) and getattr(module.forward, "__func__", None) is not _NO_FORWARD
        if not (module is None or runs):
            raise no_module(type(self).__name__, module)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_modules", ()):
            self._check_module(value)
        super().__setattr__(name, value)
        self._may_be_another(name)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._may_be_another(name)

    def _may_be_another(self, name: str) -> None:
        """Let this list, and those around, look again where it may flatten otherwise."""
        if name in _DECIDING:
            self.__dict__.update(revision=self.__dict__.get("revision", 0) + 1, _structure=None)

    def options(self) -> dict[str, Any]:
        """The options by name, as they hold."""
        return {name: getattr(self, name) for name in ("memory", "kernels", "fallback", "verify")}

    def members(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Members of the list, by name: all modules but those that compute its parameters."""
        for name, child in self._modules.items():
            computes = isinstance(child, torch.nn.ModuleDict) and name == "parametrizations"
            if not (child is None or computes):
                yield name, child

    def check_nested(self, path: str) -> None:
        """Refuse to stand in a list, at this path, where its call is no step of one; by default any may."""


def flatten(root: OpList, holding: Facts | None = None, entering: Entering | None = None) -> list[Part]:
    """The parts that a list comes to.

    Args:
        holding: what holds while it does; a group that is all goes by it.
        entering: what is known of what ranks have before it.
    """
    flattener = _Flattener()
    flattener.run(root)
    cut = len(flattener.found) > 1 and has_ranks()
    known = _entering_each(root, entering or {}) if entering or cut else {}
    parts: list[Part] = []
    later: frozenset[str] = frozenset()
    all_found = flattener.found or [_Consecutive(_Planning(root.options()))]
    for found in reversed(all_found):
        if isinstance(found, Border):
            inside = (ahead for (path, _), ahead in known.items() if f"{path}.".startswith(f"{found.path}."))
            own = {  # what enters it, by the names that it calls things
                group: replace(at, named={n: at.named[name] for n, name in found.reads.items() if name in at.named})
                for group, at in next(inside, {}).items()
            }
            part: Part = replace(found, entering=own)
        else:
            part = _group(found, holding if len(all_found) == 1 else None, known)
        parts.insert(0, replace(part, later=later))
        later |= set(names_read(part))
    return parts


_Place = tuple[str, type[FusableOperation]]


def _place(item: ListedOp) -> _Place:
    return item.path, item.lowered.op.kind


def _entering_each(root: OpList, entering: Entering) -> dict[_Place, Entering]:
    """Facts of what ranks have before each op, those with hooks included."""
    flattener, known = _Flattener(through_hooks=True), dict[_Place, Entering]()
    flattener.run(root)
    for is_border, run in itertools.groupby(flattener.items(), lambda item: isinstance(item, Border)):
        if not is_border:
            listed = [replace(item, entering=entering) for item in run if isinstance(item, ListedOp)]
            known |= {_place(item): item.entering for item in with_placements(listed)}
        entering = {}  # a module gives what nobody knows
    return known


def qualified(parts: Iterable[Part], name: str) -> str:
    """The qualified name of the output that callers call `name`, of which there is one."""
    given = [n for part in parts for n in (*part.gives, *getattr(part, "outputs", ()))]
    known = [n for n in given if "//" not in n]
    close = [n for n in known if exported(n) == name] or [n for n in known if n.rsplit("/", 1)[-1] == name]
    if len(close) == 1:
        return close[0]
    if close:
        paths = ", ".join(sorted(map(exported, close)))
        raise ValueError(f"several ops give {name!r}; name one by its path: {paths}")
    listed = ", ".join(sorted(map(exported, known))) or "none"
    raise ValueError(f"no Output({name!r}) in this list (outputs: {listed})")


@dataclass(frozen=True, eq=False)
class _Planning:
    """The options of consecutive ops, and why these are not those around them."""

    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def inside(self, module: OpList) -> _Planning:
        """The planning of a list in here: this one, or one with its own options."""
        other = {name: value for name, value in module._given.items() if value != self.options[name]}
        if not other:
            return self
        why = ", ".join(
            f"{name}={value!r} was given here, {self.options[name]!r} around it" for name, value in other.items()
        )
        return _Planning({**self.options, **other}, (f"planned by itself: {why}",))


@dataclass(frozen=True)
class _Consecutive:
    """Consecutive ops of one planning."""

    planning: _Planning
    listed: list[ListedOp] = field(default_factory=list)


def _group(run: _Consecutive, holding: Facts | None, known: Mapping[_Place, Entering]) -> FusedRegion:
    options = dict(run.planning.options)
    verify = options.pop("verify")
    bound: set[str] = set()
    reads: dict[str, None] = {}
    gives: dict[str, None] = {}
    held: dict[str, tuple[Given, str]] = {}
    for item in run.listed:
        reads |= dict.fromkeys(name for name in item.names_in.values() if name not in bound)
        held |= {_of_call(item, own): (reader, own) for reader, own in _held(item)}
        bound |= set(item.names_out)
        gives |= dict.fromkeys(item.names_out)
    listed = tuple([replace(item, entering=known[_place(item)]) if known else item for item in run.listed])
    fuser, notes = Fuser(listed, holding=holding, **options), run.planning.notes
    return FusedRegion(fuser, listed, (*reads, *held), tuple(gives), verify, notes, held=held)


class _Flattener:
    """Turns nested lists into one; names bound in a list are local to it."""

    def __init__(self, through_hooks: bool = False) -> None:
        self._through_hooks = through_hooks
        self.found: list[Border | _Consecutive] = []
        self.shared: dict[str, str] = {}  # names that a root which shares them binds -> as what

    def run(self, root: OpList) -> None:
        self._sequential(root, "", [self.shared], _Planning(root.options()))

    def items(self) -> list[ListedOp | Border]:
        """Items that were found, op by op."""
        return [item for part in self.found for item in ([part] if isinstance(part, Border) else part.listed)]

    def _sequential(self, module: OpList, path: str, scopes: list[dict[str, str]], planning: _Planning) -> None:
        inner = scopes if module.shares_names else [*scopes, {}]
        residual = f"{path}//residual"  # no name that an op inside could mean
        if module.adds_input:
            self._add(ListedOp(Fork("residual").lower()[0], path, {}, (residual,), path), planning)
        for name, child in module.members():
            here = f"{path}.{name}" if path else name
            if isinstance(child, OpList):
                child.check_nested(here)
            if runs_itself(child, not self._through_hooks):
                self._border(child, here, path, inner, planning)
            elif isinstance(child, OpList):
                self._sequential(child, here, inner, planning.inside(child))
            else:
                assert isinstance(child, FusableOperation)
                for low in child.lower():
                    names_in, names_out = self._names(low, path, inner)
                    self._add(ListedOp(low, here + low.suffix, names_in, names_out, path), planning)
        if module.adds_input:
            self._add(ListedOp(Add("residual").lower()[0], path, {"other": residual}, (), path), planning)

    def _add(self, item: ListedOp, planning: _Planning) -> None:
        last = self.found[-1] if self.found else None
        if not isinstance(last, _Consecutive) or last.planning is not planning:
            last = _Consecutive(planning)
            self.found.append(last)
        last.listed.append(item)

    def _names(
        self, low: LoweredOp, scope: str, scopes: list[dict[str, str]]
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        names_in = {arg: _resolve(given.name, scopes) for arg, given in low.op.named_inputs().items()}
        return names_in, tuple(self._bind(low.op, name, scope, scopes) for name in low.op.named_outputs())

    def _bind(self, op: FusableOperation, name: str, scope: str, scopes: list[dict[str, str]]) -> str:
        bound = f"{scope}/{name}"
        if not op_table.exports.of(type(op)):
            scopes[-1][name] = bound
        return bound

    def _border(
        self, module: torch.nn.Module, here: str, scope: str, scopes: list[dict[str, str]], planning: _Planning
    ) -> None:
        reads: dict[str, str] = {}
        gives: tuple[str, ...] = ()
        outputs: dict[str, str] = {}
        if isinstance(module, FusableOperation):
            reads = {g.name: _resolve(g.name, scopes) for low in module.lower() for g in low.op.named_inputs().values()}
            bound = {n: self._bind(module, n, scope, scopes) for n in module.named_outputs()}
            apart = set[str]()  # those that are not an op's output by another name
            for low in module.lower():
                forms = type(low.op).named_output is not FusableOperation.named_output
                apart.update(low.op.named_outputs() if forms else low.op.values)
            outputs = {name: n for n, name in bound.items() if n in apart}
            gives = tuple(name for name in bound.values() if name not in outputs)
        elif isinstance(module, OpList):
            module._around.update(planning.options)  # the dict stays: its list looks into it at each call
            inside = _Flattener()
            inside.run(module)
            free, of_call = set[str](), list[str]()
            for item in inside.items():
                if isinstance(item, ListedOp):
                    read, called = [*item.names_in.values()], [_of_call(item, own) for _, own in _held(item)]
                    given_out = item.names_out if op_table.exports.of(type(item.lowered.op)) else ()
                else:
                    read, called = ([n for n in item.reads.values() if ("." in n) == own] for own in (False, True))
                    given_out = tuple(item.outputs)
                free |= {n for n in read if "/" not in n}
                of_call += called  # what calls give in place of parameters
                for n in given_out:
                    to, _, plain = n.rpartition("/")
                    outputs[f"{here}.{to}/{plain}" if to else f"{here}/{plain}"] = exported(n)
            reads = {n: _resolve(n, scopes) for n in sorted(free)} | {n: f"{here}.{n}" for n in of_call}
            for name, own in inside.shared.items():
                scopes[-1][name] = given = f"{here}/{name}"
                outputs[given] = exported(own)
        self.found.append(Border(module, here, reads, gives, outputs))


def runs_itself(m: torch.nn.Module, hooked: bool = True) -> str:
    """Reason why a module goes through its own __call__; empty: it need not."""
    if hooked and any(GLOBAL_HOOKS):
        return "hooks of all modules"
    if hooked and any(hooks_of(m)):
        return "hooks of its own"
    if isinstance(m, OpList):
        return "a call of its own" if m.runs_alone or has_own_call(m) else ""
    if not isinstance(m, FusableOperation):
        return "no op"
    calls = type(m).__call__ is not torch.nn.Module.__call__ or type(m).forward is not FusableOperation.forward
    return "a call of its own" if calls or "forward" in m.__dict__ else ""


def has_own_call(m: OpList) -> bool:
    """True where calls of a list may do other things than its class promises."""
    if torch.compiler.is_compiling():
        from te_fuser.fuser.run.dynamo_break import constant

        promised = constant(_promises, type(m))
    else:
        promised = _promises(type(m))
    return not promised or "forward" in m.__dict__ or type(m).__call__ is not torch.nn.Module.__call__


def _promises(kind: type) -> bool:
    """True where the class that defines a list's forward promises to do no more."""
    saying = next(vars(base) for base in kind.__mro__ if vars(base).keys() & {"flattens", "forward"})
    return bool(saying.get("flattens", False))


def _resolve(name: str, scopes: list[dict[str, str]]) -> str:
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return name


def _of_call(item: ListedOp, own: str) -> str:
    return f"{item.scope}.{own}" if item.scope else own


def _held(item: ListedOp) -> Iterable[tuple[Given, str]]:
    for binding in item.lowered.bindings.values():
        if isinstance(owner := binding.owner, Given):
            for name in getattr(binding, "names", (binding.name,)):
                yield owner, name


def exported(name: str) -> str:
    """A qualified name as callers write it: its path and itself, joined by dots."""
    return name.replace("/", ".").lstrip(".")
