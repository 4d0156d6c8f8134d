"""Sequential: a list of ops that plans itself, with torch.nn.Sequential's list semantics; Residual: x + branch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.fuser.fuser import Fuser, check_input, check_options, named_tensors
from te_fuser.fuser.listed import ListedOp
from te_fuser.fuser.loading import draw_seed
from te_fuser.fuser.plan import Plan
from te_fuser.fuser.reference import reference_run
from te_fuser.ops.add import Add
from te_fuser.ops.base import FusableOperation, LoweredOp, walk
from te_fuser.ops.fork import Fork
from te_fuser.ops.main_grad import spared

if TYPE_CHECKING:
    from te_fuser.fuser.tune import TuneReport


@dataclass(frozen=True)
class Border:
    """A module that runs by its own __call__: a plain nn.Module, one that carries hooks or has its own forward."""

    module: torch.nn.Module
    path: str
    reads: Mapping[str, str] = field(default_factory=dict)  # keyword -> qualified name
    gives: tuple[str, ...] = ()  # other names of its result
    outputs: Mapping[str, str] = field(default_factory=dict)  # qualified name -> what the module calls it


@dataclass(frozen=True)
class Group:
    """Consecutive ops that are planned together, and the names that cross its ends."""

    fuser: Fuser
    listed: tuple[ListedOp, ...]
    reads: tuple[str, ...]
    gives: tuple[str, ...]


class Sequential(torch.nn.Sequential):
    """Operations in order, fused where that pays: y = op_n(... op_1(x)).

    It has the list semantics of `torch.nn.Sequential`. Nested Sequentials are fused as if their ops stood in this
    list; plain modules and modules with hooks run by themselves and split the list into groups.

    Args:
        *ops: operations and modules, or one ordered dict of them.
        memory: "fast", "balanced" or "lean", or a budget in bytes: what is kept for backward (see `explain`).
        kernels: "auto" (generated kernels where they can be had), "generated" (an error where they cannot) or
            "reference" (PyTorch operations).
        fallback: what "auto" does on a GPU where generated kernels cannot be had: "warn" once and run PyTorch's, or
            raise an "error" that says what is missing.
        verify: check every fused step on the data it sees against float64; slow, raises when a step errs.
    """

    def __init__(
        self,
        *ops: Any,
        memory: str | int = "balanced",
        kernels: str = "auto",
        fallback: str = "warn",
        verify: bool = False,
    ) -> None:
        check_options(memory, kernels, fallback)
        super().__init__(*ops)
        self.memory, self.kernels, self.fallback, self.verify = memory, kernels, fallback, verify
        self._parts: list[Border | Group] = []
        self._token: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold locks and kernels: a copy and a pickle of the model make their own.
        return {**self.__dict__, "_parts": [], "_token": None}

    # ------------------------------------------------------------------------------ list semantics

    def _options(self) -> dict[str, Any]:
        return {**self._planning(), "verify": self.verify}

    def _planning(self) -> dict[str, Any]:
        return {"memory": self.memory, "kernels": self.kernels, "fallback": self.fallback}

    def _like(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> Sequential:
        return Sequential(OrderedDict(modules), **self._options())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._like(list(self._modules.items())[index])  # type: ignore[arg-type]
        return super().__getitem__(index)

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
        """Run the plans.

        Args:
            x: [..., features].
            outputs: names of `Output`s to return beside the result, in this order.
            **inputs: the tensors that ops read by name.

        Returns:
            y, or (y, *outputs).

        Raises:
            TypeError, ValueError: when the input does not fit the list, naming op, position, and what to do.
        """
        if torch.compiler.is_compiling():
            from te_fuser.fuser.outside_tracing import outside_tracing

            return outside_tracing(Sequential._run, self, x, outputs, inputs)
        return self._run(x, outputs, inputs)

    def _run(self, x: torch.Tensor, outputs: Sequence[str], inputs: Mapping[str, torch.Tensor]) -> Any:
        parts = self._prepared()
        wanted = self._wanted(outputs) if outputs else ()
        if len(parts) == 1 and type(parts[0]) is Group:
            if self.verify:
                return self._verified(parts[0].fuser, x, inputs, wanted)
            return parts[0].fuser.run(x, inputs, wanted)
        return self._run_parts(parts, x, inputs, wanted)

    def _wanted(self, outputs: Sequence[str]) -> tuple[str, ...]:
        if isinstance(outputs, str):
            raise TypeError(f"outputs is a sequence of names, got {outputs!r}; write outputs=({outputs!r},)")
        return tuple(map(self._qualified, outputs))

    def _verified(
        self, fuser: Fuser, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]
    ) -> Any:
        from te_fuser.verify import run_verified

        return run_verified(fuser, x, inputs, outputs)

    def _run_parts(
        self, parts: list[Border | Group], x: Any, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]
    ) -> Any:
        values = named_tensors(inputs)
        read = {name for part in parts for name in _reads(part)}
        unknown = sorted(set(inputs) - read)
        if unknown:
            takes = ", ".join(sorted(n for n in read if "/" not in n)) or "none"
            raise TypeError(f"unknown input {unknown[0]!r}: no op of this list reads it (named inputs: {takes})")
        for k, part in enumerate(parts):
            later = {name for p in parts[k + 1 :] for name in _reads(p)} | set(outputs)
            if isinstance(part, Border):
                x = self._run_border(part, x, values, later)
                continue
            given = {n: values[n] for n in part.reads if n in values}
            wanted = tuple(n for n in part.gives if n in later)
            made = self._verified(part.fuser, x, given, wanted) if self.verify else part.fuser.run(x, given, wanted)
            if wanted:
                x, *extra = made
                values.update(zip(wanted, extra, strict=True))
            else:
                x = made
        return (x, *(values[n] for n in outputs)) if outputs else x

    def _run_border(self, part: Border, x: Any, values: dict[str, torch.Tensor], later: Container[str]) -> Any:
        given: dict[str, Any] = {keyword: values[name] for keyword, name in part.reads.items() if name in values}
        wanted = [name for name in part.outputs if name in later]
        if wanted:
            y, *extra = part.module(x, outputs=tuple(part.outputs[name] for name in wanted), **given)
            values.update(zip(wanted, extra, strict=True))
        else:
            y = part.module(x, **given)
        values.update(dict.fromkeys(part.gives, y))
        return y

    def _qualified(self, name: str) -> str:
        given = [n for part in self._prepared() for n in (*part.gives, *getattr(part, "outputs", ()))]
        known = [n for n in given if "//" not in n]
        exported = [n for n in known if _exported(n) == name]
        close = exported or [n for n in known if n.rsplit("/", 1)[-1] == name]
        if len(close) == 1:
            return close[0]
        if close:
            paths = ", ".join(sorted(map(_exported, close)))
            raise ValueError(f"several ops give {name!r}; name one by its path: {paths}")
        listed = ", ".join(sorted(map(_exported, known))) or "none"
        raise ValueError(f"no Output({name!r}) in this list (outputs: {listed})")

    # ----------------------------------------------------------------------------------- structure

    def _prepared(self) -> list[Border | Group]:
        if self._token is None or not self._unchanged():
            self._rebuild()
        return self._parts

    def _unchanged(self) -> bool:
        containers, members, hooks, no_hooks, ops, revisions, options = self._token
        if [m for c in containers for m in c._modules.values()] != members:
            return False
        if any(no_hooks) or not all(hooks) or [op.revision for op in ops] != revisions:
            return False
        return options == (self.memory, self.kernels, self.fallback)

    def _rebuild(self) -> None:
        containers = [m for m in self.modules() if isinstance(m, Sequential)]
        members = [m for c in containers for m in c._modules.values()]
        watched = [m for c in containers for m in c._modules.values() if m is not None]
        given = [h for m in watched for h in _hook_dicts(m)]
        hooks, no_hooks = [h for h in given if h], [h for h in given if not h]
        ops = [m for m in watched if isinstance(m, FusableOperation)]
        revisions = [op.revision for op in ops]
        items = _Flattener().run(self)
        _check_closed(items)
        self._parts = list(self._grouped(items))
        options = (self.memory, self.kernels, self.fallback)
        self._token = (containers, members, hooks, no_hooks, ops, revisions, options)

    def _grouped(self, items: list[ListedOp | Border]) -> Iterable[Border | Group]:
        run: list[ListedOp] = []
        for item in items:
            if isinstance(item, ListedOp):
                run.append(item)
                continue
            if run:
                yield self._group(run)
                run = []
            yield item
        if run or not items:
            yield self._group(run)

    def _group(self, run: list[ListedOp]) -> Group:
        fuser = Fuser(tuple(run), **self._planning())
        bound: set[str] = set()
        reads: dict[str, None] = {}
        gives: dict[str, None] = {}
        for item in run:
            for name in item.names_in.values():
                if name not in bound:
                    reads[name] = None
            for name in item.names_out:
                bound.add(name)
                gives[name] = None
        return Group(fuser, tuple(run), tuple(reads), tuple(gives))

    # ------------------------------------------------------------------------------- looking inside

    def plan(self, x: torch.Tensor, *, outputs: Sequence[str] = (), device: Any = None, **inputs: torch.Tensor) -> Plan:
        """The plan of a call like this one, as data; nothing runs.

        Raises:
            ValueError: when plain modules split the list into several plans; see `plans`.
        """
        found = self.plans(x, outputs=outputs, device=device, **inputs)
        if len(found) != 1:
            raise ValueError(f"plain modules split this list into {len(found)} plans; use plans(x)")
        return found[0]

    def plans(
        self, x: torch.Tensor, *, outputs: Sequence[str] = (), device: Any = None, **inputs: torch.Tensor
    ) -> list[Plan]:
        """One plan for each group of ops between plain modules; the plain modules are run to see their outputs."""
        from te_fuser.fuser.device import device_named

        roofline = device_named(device) if isinstance(device, str) else device
        parts = self._prepared()
        qualified = self._wanted(outputs)
        values = named_tensors(inputs)
        found = []
        current: Any = x
        for k, part in enumerate(parts):
            later = {name for p in parts[k + 1 :] for name in _reads(p)} | set(qualified)
            if isinstance(part, Border):
                with torch.no_grad():
                    current = self._run_border(part, current, values, later)
                continue
            given = {n: values[n] for n in part.reads if n in values} if len(parts) > 1 else values
            wanted = tuple(n for n in part.gives if n in later)
            plan = part.fuser.plan(current, given, wanted, roofline)
            found.append(plan)
            current = _like_output(plan, plan.graph.output, x.device)
            values.update({n: _like_output(plan, plan.graph.named_outputs[n], x.device) for n in wanted})
        return found

    def explain(
        self,
        x: torch.Tensor | None = None,
        *,
        device: str | None = None,
        source: bool = False,
        measure: bool = False,
        outputs: Sequence[str] = (),
        **inputs: torch.Tensor,
    ) -> Any:
        """Both plans as tables: what is fused, what is not and why, bytes, predicted time, what is kept.

        Args:
            x: an input like those of the calls to explain; torch.empty of its shape will do, on the meta device too
                where `device` is given.
            device: a named device to predict for, e.g. "h200"; by default the one at hand.
            source: show the generated code too.
            measure: run the call a few times, forward and backward, and show measured beside predicted times.

        Returns:
            An object that prints as text (`print(model.explain(x))`); `.plans` holds the data.

        Raises:
            ValueError: for `measure` on a device that is only named.
        """
        from te_fuser.fuser.explain import Explanation

        if x is None:
            raise TypeError("explain(x) needs an input like those of your calls; torch.empty of its shape will do")
        if not measure:
            return Explanation(self.plans(x, outputs=outputs, device=device, **inputs), source)
        if device is not None:
            raise ValueError(f"measure=True runs on the device at hand; leave out device={device!r}")
        found = self._measured(x, outputs, inputs)
        return Explanation([plan for plan, _ in found], source, [times for _, times in found])

    def _measured(self, x: torch.Tensor, outputs: Sequence[str], inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        """(plan, times) for each group of ops between plain modules."""
        from te_fuser.fuser.measure import measured_run

        def run(*call: Any) -> tuple[Any, Any]:
            plan, times, made = measured_run(*call)
            return (plan, times), made

        return self._for_each_group(run, x, outputs, inputs)

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
        """Measure other choices in this model on this device, and plan by what is faster from now on.

        Every fusion that fits somewhere is tried where it was not taken and left out where it was, forward and
        backward together, in alternating rounds; on a GPU then other schedules of generated kernels and other
        algorithms of products. What gives other outputs or gradients than the default is refused, with the reason in
        the report. What is found is kept on disk, fusions for this list of ops, device and number of rows (by power of
        two), and holds for later processes too.

        Args:
            x: an input like those of the calls to come; gradients are measured for what requires one.
            outputs: names of `Output`s, as in the calls to come.
            rounds, seconds: how often each of two plans has its turn, and how long a turn lasts.
            margin: the share of the time that a choice must gain to be taken.
            **inputs: the tensors that ops read by name.

        Returns:
            What was tried and what it gave; prints as a table.

        Raises:
            OSError: before anything is measured, when the cache folder cannot be written.
        """
        from te_fuser.fuser.tune import Effort, TuneReport, tune

        effort = Effort(rounds, seconds, margin)

        def run(fuser: Fuser, x: torch.Tensor, given: Mapping[str, torch.Tensor], wanted: tuple[str, ...]) -> Any:
            return tune(fuser, x, given, wanted, effort)

        return TuneReport.of(self._for_each_group(run, x, outputs, inputs))

    def _for_each_group(
        self,
        run: Callable[[Fuser, torch.Tensor, Mapping[str, torch.Tensor], tuple[str, ...]], tuple[Any, Any]],
        x: torch.Tensor,
        outputs: Sequence[str],
        inputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """What `run` measures for each group of ops between plain modules; it gives that and what the group returns."""
        parts = self._prepared()
        qualified = self._wanted(outputs)
        values = named_tensors(inputs)
        results = []
        for k, part in enumerate(parts):
            later = {name for p in parts[k + 1 :] for name in _reads(p)} | set(qualified)
            if isinstance(part, Border):
                x = self._run_border(part, x, values, later)
                continue
            check_input(x)
            given = {n: values[n] for n in part.reads if n in values} if len(parts) > 1 else values
            wanted = tuple(n for n in part.gives if n in later)
            with spared(self.parameters()):
                result, made = run(part.fuser, x, given, wanted)
            results.append(result)
            x, *extra = made if wanted else (made,)
            values.update(zip(wanted, extra, strict=True))
        return results

    def reference(self, x: torch.Tensor, *, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> Any:
        """The same result op by op from their meaning, in plain differentiable PyTorch operations."""
        parts = self._prepared()
        qualified = self._wanted(outputs)
        values = named_tensors(inputs)
        for part in parts:
            if isinstance(part, Border):
                x = self._run_border(part, x, values, qualified)
                continue
            # One seed for each plan, as when it runs fused: the same manual_seed draws the same masks.
            seed = draw_seed(x.device) if any(o.lowered.op.draws() for o in part.listed) else None
            x = reference_run(part.listed, x, values, seed)
        return (x, *(values[n] for n in qualified)) if qualified else x

    def operations(self) -> list[FusableOperation]:
        """Every op below this list."""
        return list(walk(self))


class Residual(Sequential):
    """A branch and its sum: y = x + op_n(... op_1(x)).

    Raises:
        ValueError: when the branch changes the shape (found at the first call).

    Source: He et al., "Deep residual learning for image recognition" (2015).
    """


class _Flattener:
    """Turns nested Sequentials into one list; names bound in a Sequential are local to it."""

    def __init__(self) -> None:
        self.items: list[ListedOp | Border] = []

    def run(self, root: Sequential) -> list[ListedOp | Border]:
        self._sequential(root, "", [])
        return self.items

    def _sequential(self, module: Sequential, path: str, scopes: list[dict[str, str]]) -> None:
        inner = [*scopes, {}]
        residual = f"{path}//residual"  # no name that an op inside could mean
        if isinstance(module, Residual):
            self._structure(Fork("residual"), path, {}, (residual,))
        for name, child in module._modules.items():
            if child is None:
                continue
            here = f"{path}.{name}" if path else name
            if _runs_itself(child):
                self._border(child, here, path, inner)
            elif isinstance(child, Sequential):
                self._sequential(child, here, inner)
            else:
                assert isinstance(child, FusableOperation)
                self._op(child, here, path, inner)
        if isinstance(module, Residual):
            self._structure(Add("residual"), path, {"other": residual}, ())

    def _structure(
        self, op: FusableOperation, path: str, names_in: Mapping[str, str], names_out: tuple[str, ...]
    ) -> None:
        for low in op.lower():
            self.items.append(ListedOp(low, path, names_in, names_out, path))

    def _op(self, op: FusableOperation, here: str, scope: str, scopes: list[dict[str, str]]) -> None:
        for low in op.lower():
            names_in, names_out = self._names(low, scope, scopes)
            self.items.append(ListedOp(low, here + low.suffix, names_in, names_out, scope))

    def _names(
        self, low: LoweredOp, scope: str, scopes: list[dict[str, str]]
    ) -> tuple[dict[str, str], tuple[str, ...]]:
        names_in = {arg: _resolve(given.name, scopes) for arg, given in low.op.named_inputs().items()}
        return names_in, tuple(self._bind(low.op, name, scope, scopes) for name in low.op.named_outputs())

    def _bind(self, op: FusableOperation, name: str, scope: str, scopes: list[dict[str, str]]) -> str:
        qualified = f"{scope}/{name}"
        if not getattr(op, "exports", False):
            scopes[-1][name] = qualified
        return qualified

    def _border(self, module: torch.nn.Module, here: str, scope: str, scopes: list[dict[str, str]]) -> None:
        reads: dict[str, str] = {}
        gives: tuple[str, ...] = ()
        outputs: dict[str, str] = {}
        if isinstance(module, FusableOperation):
            reads = {g.name: _resolve(g.name, scopes) for low in module.lower() for g in low.op.named_inputs().values()}
            gives = tuple(self._bind(module, n, scope, scopes) for n in module.named_outputs())
        elif isinstance(module, Sequential):
            inside = _Flattener().run(module)
            free = {n for item in inside for n in _names_read(item) if "/" not in n}
            reads = {n: _resolve(n, scopes) for n in sorted(free)}
            outputs = {_inside(here, n): _exported(n) for item in inside for n in _names_exported(item)}
        self.items.append(Border(module, here, reads, gives, outputs))


def _resolve(name: str, scopes: list[dict[str, str]]) -> str:
    for scope in reversed(scopes):
        if name in scope:
            return scope[name]
    return name


def _check_closed(items: Iterable[ListedOp | Border]) -> None:
    """Refuse a name that is closed on both sides of a plain module; where there is none, the graph of the ops does."""
    closed: dict[str, tuple[int, str]] = {}
    group = 0
    for item in items:
        if isinstance(item, Border):
            group += 1
            continue
        given = item.lowered.op.named_inputs()
        label = f"op {item.path!r} ({item.lowered.op.kind.__name__})"
        for name in [n for argument, n in item.names_in.items() if given[argument].gradient and "/" in n]:
            if name in closed and closed[name][0] != group:
                raise ValueError(f"{label}: {name.rpartition('/')[2]!r} was already closed by {closed[name][1]}")
            closed[name] = (group, label)
        for name in item.names_out:
            closed.pop(name, None)


def _names_read(item: ListedOp | Border) -> Iterable[str]:
    return item.names_in.values() if isinstance(item, ListedOp) else item.reads.values()


def _names_exported(item: ListedOp | Border) -> Iterable[str]:
    if isinstance(item, Border):
        return item.outputs
    return item.names_out if item.lowered.op.exports else ()


def _inside(here: str, name: str) -> str:
    """The qualified name that a list at `here` has for what the Sequential there calls `name`."""
    scope, _, plain = name.rpartition("/")
    return f"{here}.{scope}/{plain}" if scope else f"{here}/{plain}"


def _exported(name: str) -> str:
    """A qualified name as callers write it: its path and itself, joined by dots."""
    return name.replace("/", ".").lstrip(".")


def _reads(part: Border | Group) -> Iterable[str]:
    return part.reads if isinstance(part, Group) else part.reads.values()


def _hook_dicts(m: torch.nn.Module) -> tuple[Any, ...]:
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


def _runs_itself(m: torch.nn.Module) -> bool:
    """Whether a module must go through its own __call__: it is no op, carries hooks, or its forward is its own."""
    if any(_hook_dicts(m)) or "forward" in m.__dict__:
        return True
    if isinstance(m, Sequential):
        return type(m).forward is not Sequential.forward
    return not isinstance(m, FusableOperation) or type(m).forward is not FusableOperation.forward


def _like_output(plan: Plan, value: int, device: torch.device) -> torch.Tensor:
    v = plan.graph.values[value]
    return torch.empty(v.spec.shape, dtype=v.spec.dtype, device=device).requires_grad_(v.needs_grad)
