"""The parts of a list, groups of ops and borders between them, and the walk from one to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Union

import torch

from te_fuser.distributed.placement import Entering, entering
from te_fuser.fake_tensors import LastCall, NotSeenError, looking
from te_fuser.fuser.graph.op_instances import CallSpecs, ListedOp, bindings_of
from te_fuser.fuser.graph.passes import keys_now, prepared
from te_fuser.fuser.graph.reference import reference_run
from te_fuser.fuser.pipeline import Fuser, lower
from te_fuser.fuser.run.loading import draw_seed
from te_fuser.ops.hooks import has_users_hooks
from te_fuser.params.binding import Given, has_tensor

if TYPE_CHECKING:
    from te_fuser.fuser.plan.plan import Plan


@dataclass(frozen=True)
class Border:
    """A module that runs by its own __call__: no op, or one with hooks or its own forward."""

    module: torch.nn.Module
    path: str
    reads: Mapping[str, str] = field(default_factory=dict)  # keyword -> qualified name
    gives: tuple[str, ...] = ()  # other names of its result
    outputs: Mapping[str, str] = field(default_factory=dict)  # qualified name -> what the module calls it
    later: frozenset[str] = frozenset()  # what parts behind it read
    entering: Entering = field(default_factory=dict)  # what is known of what ranks have before it
    last: LastCall = field(default_factory=LastCall, compare=False)

    def run(self, x: Any, values: dict[str, torch.Tensor], wanted: Sequence[str]) -> Any:
        """The module's result; what it names goes to `values`."""
        given, asked = self._given(values), self._asked(wanted)
        made = self._made(self.module, x, given, asked)
        self.last.note(self.module, (x, *given.values()), asked, made)
        return self._named(made, asked, values)

    def tried(self, x: Any, values: dict[str, torch.Tensor], wanted: Sequence[str]) -> Any:
        """The module's result in a run that only measures and calls no hooks of users.

        Where it has such, which may change what it gives, that is random numbers in the form of its last result.
        """
        given, asked = self._given(values), self._asked(wanted)
        gave = self.last.gave(self.module, (x, *given.values()), asked) if has_users_hooks(self.module) else None
        if gave is None:
            return self._named(self._made(self.module, x, given, asked), asked, values)
        made = []
        for shape, dtype, device, needs_grad in gave:
            made.append(torch.randn(tuple(shape), device=device).to(dtype).requires_grad_(needs_grad))
        return self._named(made, asked, values)

    def looked_at(self, x: Any, values: dict[str, torch.Tensor], wanted: Sequence[str]) -> Any:
        """Stand-in for the result of stand-ins; NotSeenError where that takes a real call."""
        given, asked = self._given(values), self._asked(wanted)
        gave = self.last.gave(self.module, (x, *given.values()), asked)
        with looking() as look:
            if gave is not None:
                return self._named([look.made(*form) for form in gave], asked, values)
            try:
                made = look.run(self._made, look.copied(self.module), x, given, asked)
            except Exception as error:  # whatever a user's module raises that looks at values
                raise NotSeenError(
                    f"what {self.path!r} ({type(self.module).__name__}) gives cannot be told without values "
                    f"({type(error).__name__}: {error}); call the model once with an input like this one, then look"
                ) from error
        return self._named(made, asked, values)

    def _given(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {keyword: values[name] for keyword, name in self.reads.items() if name in values}

    def _asked(self, wanted: Sequence[str]) -> list[str]:
        return [name for name in self.outputs if name in self.later or name in wanted]

    def _made(self, module: torch.nn.Module, x: Any, given: Mapping[str, Any], asked: Sequence[str]) -> Sequence[Any]:
        with entering(module, self.entering) if self.entering else contextlib.nullcontext():
            if asked:
                return module(x, outputs=tuple(self.outputs[name] for name in asked), **given)  # type: ignore[no-any-return]
            return (module(x, **given),)

    def _named(self, made: Sequence[Any], asked: Sequence[str], values: dict[str, torch.Tensor]) -> Any:
        y, *extra = made
        values.update(zip(asked, extra, strict=True))
        values.update(dict.fromkeys(self.gives, y))
        return y


@dataclass(frozen=True)
class FusedRegion:
    """Consecutive ops that are planned together, and the names that cross its ends."""

    fuser: Fuser
    listed: tuple[ListedOp, ...]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    verify: bool
    notes: tuple[str, ...]  # why its ops are planned by themselves
    later: frozenset[str] = frozenset()  # what parts behind it read
    held: Mapping[str, tuple[Given, str]] = field(default_factory=dict)  # name in a call -> who reads it, and as what

    def run(self, run: GroupRun, x: Any, given: Mapping[str, torch.Tensor], asked: tuple[str, ...]) -> Any:
        """`run` for this group, whose ops may read what the call gives as parameters."""
        if not self.held:
            return run(self, x, given, asked)
        tensors: dict[Given, dict[str, torch.Tensor]] = {}
        for name, (reader, own) in self.held.items():
            if given.get(name) is not None:
                tensors.setdefault(reader, {})[own] = given[name]
            elif not has_tensor(reader, own):
                raise TypeError(f"an op reads {own!r} of the call: call the model with **{{{name!r}: tensor}}")
        with contextlib.ExitStack() as stack:
            for reader, held in tensors.items():
                stack.enter_context(reader.holding(**held))
            return run(self, x, {name: t for name, t in given.items() if name not in self.held}, asked)

    def reference(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]) -> Any:
        """The meaning of its ops, op by op, in PyTorch's operations alone."""
        values = dict(inputs)
        keys = keys_now(x.dtype)
        listed = prepared(self.listed, keys, reads=True).listed if keys else self.listed
        parameters = {b: b.get() for b in bindings_of(listed)}  # before the seed, as when it runs fused
        # One seed for each plan, as when it runs fused: the same manual_seed draws the same masks.
        seed = draw_seed(x.device) if any(o.lowered.op.draws() for o in self.listed) else None
        call = CallSpecs.of(x, values, parameters, around=keys)
        y = reference_run(lower(listed, call), x, values, parameters, seed)
        return (y, *(values[n] for n in outputs)) if outputs else y

    def noted(self, plan: Plan) -> Plan:
        """A plan of its ops, with why these are planned by themselves."""
        return replace(plan, notes=(*plan.notes, *self.notes)) if self.notes else plan


Part = Union[Border, FusedRegion]  # noqa: UP007 - a type alias at run time
GroupRun = Callable[[FusedRegion, torch.Tensor, Mapping[str, torch.Tensor], tuple[str, ...]], Any]


def walk_parts(
    parts: Sequence[Part],
    x: Any,
    inputs: Mapping[str, torch.Tensor],
    wanted: Sequence[str],
    run: GroupRun,
    run_border: Callable[..., Any] = Border.run,
) -> Any:
    """Go through the parts of a list from x to y; gives y, or (y, *outputs).

    Args:
        wanted: qualified names of the outputs to return beside y.
        run: takes a group, its input, its named inputs and the names of its outputs that are asked for, and gives what
            the group returns.
    """
    values = {name: t for name, t in inputs.items() if t is not None}
    if len(parts) > 1 or getattr(parts[0], "held", None):
        read = {name for part in parts for name in names_read(part)}
        unknown = sorted(set(values) - read)
        if unknown:
            takes = ", ".join(sorted(n for n in read if "/" not in n)) or "none"
            raise TypeError(f"unknown input {unknown[0]!r}: no op of this list reads it (named inputs: {takes})")
    for part in parts:
        if isinstance(part, Border):
            x = run_border(part, x, values, wanted)
            continue
        given = {n: values[n] for n in part.reads if n in values} if len(parts) > 1 else values
        asked = tuple(n for n in part.gives if n in part.later or n in wanted)
        made = part.run(run, x, given, asked)
        x, *extra = made if asked else (made,)
        values.update(zip(asked, extra, strict=True))
    return (x, *(values[n] for n in wanted)) if wanted else x


def names_read(part: Part) -> Iterable[str]:
    """The names that a part reads."""
    return part.reads if isinstance(part, FusedRegion) else part.reads.values()
