"""Declaration of a fusion: `@fusion`, its `Details`, and what is refused of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.fusions.match import Match
from te_fuser.fusions.pattern import PatternPart, check, most_ops
from te_fuser.fusions.registry import ALL, Choose, Condition, Costs, Fusion, register
from te_fuser.ops.base import Gradient

if TYPE_CHECKING:
    from te_fuser.codegen.cuda_source_kernel import WrittenKernel


@dataclass(frozen=True)
class Details:
    """Rarer arguments of a fusion: how its function is called, and facts for the planner.

    Attributes:
        takes: names of tensors ("input" or "dy", "0.weight", ..., "-1.bias" of the last op) with which the function (of
            a joint fusion: forward) is called in place of (m, x), which takes less host time.
        gives: names of its results, a tuple if there are several; by default "output" (and what a joint fusion saves)
            or "input" (dx).
        gradients: nodes of a backward that can run as separate steps, in place of `backward`. The fusion is then a
            class, each node's `method` a static method f(dy, *reads) -> what it produces, and `cost` may return a Cost
            for each node. A node without "input" runs when its inputs are there, which may be computed again first.
        choose: f(match, method) -> the function to run for a match, a `Body`, or None for the declared one; `method` is
            "forward", "backward" or a node's. It is called once for each step, while planning, so the function may hold
            constants of all calls. Its arguments are those of the declared one.
        saved_bytes: f(match) -> {name in `saves`: bytes}, for the plan; missing names count as 0.
        forward_ops, backward_ops: of a joint fusion, the ops of its match that each direction covers: the last n, or a
            slice; all by default. The others are planned as usual. Names count the covered ops, in backward also from
            the end: "-1.input".
        compiles: f(match, direction, needed) -> hand-written CUDA kernels that the function launches in that direction,
            which are compiled and loaded with the plan. The match has the covered ops; `needed` names gradients.
        takes_gradients_in: further dtypes, beside the output's, that backward accepts for dy (`match.dy`).
        registered: False keeps it out of plans; `fusions.only(fusion)` and `te_fuser.verify` take it.
    """

    takes: Sequence[str] = ()
    gives: Sequence[str] = ()
    gradients: Sequence[Gradient] = ()
    choose: Choose | None = None
    saved_bytes: Callable[[Match], Mapping[str, int]] | None = None
    forward_ops: int | slice = field(default_factory=lambda: ALL)
    backward_ops: int | slice = field(default_factory=lambda: ALL)
    compiles: Callable[[Match, str, frozenset[str]], Iterable[WrittenKernel]] | None = None
    takes_gradients_in: Sequence[torch.dtype] = ()
    registered: bool = True


# What a fusion declares -> the directions that have it.
_DECLARED = {
    "emits": ("forward", "joint"),
    "reads": ("backward", "joint"),
    "saves": ("joint",),
    "takes": ("forward", "backward", "joint"),
    "gives": ("forward", "backward", "joint"),
    "gradients": ("backward", "joint"),
    "takes_gradients_in": ("backward", "joint"),
    "saved_bytes": ("joint",),
}


def _check_names(direction: str, fusion: str | None, declared: dict[str, Any]) -> None:
    label = f"fusion {fusion!r}" if fusion else "fusion"
    for what, names in declared.items():
        if isinstance(names, str):
            raise TypeError(f"{label}: {what} is a sequence of names, got {names!r}; write ({names!r},)")
        if names and direction not in _DECLARED[what]:
            raise ValueError(f"{label}: a {direction} fusion has no {what}; that is for {', '.join(_DECLARED[what])}")
    for name in declared["emits"]:
        if not re.fullmatch(r"\d+\.\w+", name):
            raise ValueError(
                f'{label}: emits names values inside the match, "0.output" for the first op\'s, got {name!r}'
            )


def _check_meant(entry: Fusion) -> None:
    """Refuse names that mean nothing, and numbers of ops that the pattern has not."""
    words = {"forward": ("input",), "backward": ("dy", *entry.reads), "joint": ("input",)}[entry.direction]
    made = ("input",) if entry.direction == "backward" else ("output", *entry.saves)
    named = [("emits", entry.emits, ()), ("reads", entry.reads, ("input", "output"))]
    named += [("takes", entry.takes, words), ("gives", entry.gives, made)]
    for node in entry.gradients:
        named += [
            ("gradients", node.produces, ("input",)),
            ("gradients", node.reads, ("input", "output", *entry.saves)),
        ]
    most = most_ops(entry.pattern)
    for what, names, known in named:
        for name in names:
            number, dot, _ = name.rpartition(".")
            if not dot and name not in known:
                there = ", ".join(map(repr, (*known, "0.weight")))
                hint = "; name it in reads" if what == "takes" and name in ("input", "output") else ""
                raise ValueError(f"fusion {entry.name!r}: {what} {name!r}, which is none of its names ({there}){hint}")
            if most is not None and number.isdigit() and int(number) >= most:
                raise ValueError(
                    f"fusion {entry.name!r}: {what} {name!r}, and its pattern has at most {most} ops, counted from 0"
                )


def _part(direction: str, what: str, given: int | slice) -> slice:
    """Slice of the ops of a match that a direction covers."""
    part = slice(-given, None) if isinstance(given, int) else given
    positive = isinstance(given, slice) or (isinstance(given, int) and given > 0)
    if not positive or part.step not in (None, 1) or (direction != "joint" and part != ALL):
        raise ValueError(
            f"{what} is a number of ops of a joint fusion, or a slice of them, got {given!r} for a {direction} one"
        )
    return part


def _with_deprecated(details: Details, given: dict[str, Any]) -> Details:
    """The details with those given as keywords of `fusion` itself, as all once were."""
    if not isinstance(details, Details):
        raise TypeError(f"fusion: details is fusions.Details(...), got {details!r}")
    known = {f.name for f in fields(Details)}
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise TypeError(f"fusion() got an unexpected keyword argument {unknown!r}")
    if given:
        written = ", ".join(f"{name}=..." for name in given)
        warnings.warn(
            f"fusion({written}) is deprecated; write fusion(details=te_fuser.fusions.Details({written}))",
            DeprecationWarning,
            stacklevel=3,
        )
    return replace(details, **given)


def fusion(
    *,
    forward: Sequence[PatternPart] | None = None,
    backward: Sequence[PatternPart] | None = None,
    joint: Sequence[PatternPart] | None = None,
    name: str | None = None,
    when: Condition | None = None,
    cost: Callable[[Match], Costs] | None = None,
    emits: Sequence[str] = (),
    reads: Sequence[str] = (),
    saves: Sequence[str] = (),
    details: Details = Details(),  # noqa: B008 - frozen
    **deprecated: Any,
) -> Callable[[Any], Fusion]:
    """Declare a fusion; give exactly one of `forward`, `backward`, `joint`, a pattern in the order of the list.

    forward:  decorates f(m, x) -> y; extra values by m.emit("0.output", tensor) when declared in `emits`.
    backward: decorates f(m, dy) -> dx or (dx, {"0.weight": dw, ...}); reads what `reads` declares.
    joint:    decorates a class with static methods forward(m, x) and backward(m, dy); `saves` names what the first
              hands to the second by m.emit(name, tensor).

    Functions for planning (`when`, `cost`; in details `saved_bytes`, `choose`) get the whole match.

    Args:
        when: f(match) -> True, or False, or a reason as a string, which explain() shows.
        cost: f(match) -> Cost, or of a joint fusion (forward's, backward's); by default one launch, the bytes that
            enter and leave, and the products' flops.
        details: rarer arguments, see `Details`.

    Raises:
        ValueError, TypeError: without exactly one pattern, for one that cannot match, and for contradictory arguments.
    """
    details = _with_deprecated(details, deprecated)
    given = {"forward": forward, "backward": backward, "joint": joint}
    chosen = [d for d, p in given.items() if p is not None]
    if len(chosen) != 1:
        raise ValueError(f"a fusion has exactly one of forward=, backward=, joint=, got {chosen or 'none'}")
    direction = chosen[0]
    named = {"emits": emits, "reads": reads, "saves": saves}
    _check_declared(direction, name, named, details, when=when, cost=cost)

    def declare(body: Any) -> Fusion:
        own = name or getattr(body, "__name__", "")
        if not own or not isinstance(own, str):
            how = f"give a text as name=, or a function or class to decorate, got {own!r}"
            raise TypeError(f"a fusion has a name: {how}")
        entry = Fusion(
            own,
            direction,
            check(given[direction], own),  # type: ignore[arg-type]
            *_directions(own, direction, body, details),
            when=when,
            cost=cost,
            doc=(body.__doc__ or "").strip(),
            **_as_declared(direction, named, details),
        )
        _check_meant(entry)
        return register(entry) if details.registered else entry

    return declare


def chosen(
    name: str, direction: str, pattern: Sequence[PatternPart], doc: str, registered: bool = True, **said: Any
) -> Fusion:
    """Declare a fusion whose `choose` gives what runs; `said` as `Fusion` has it."""
    entry = Fusion(name, direction, check(pattern, name), None, None, doc=doc, **said)
    return register(entry) if registered else entry


def _check_declared(
    direction: str, name: str | None, named: dict[str, Sequence[Any]], details: Details, **asked: Any
) -> None:
    """Check what a declaration says of itself, before there is a body."""
    names = ("takes", "gives", "gradients", "saved_bytes", "takes_gradients_in")
    _check_names(direction, name, {**named, **{what: getattr(details, what) for what in names}})
    for what in ("forward_ops", "backward_ops"):
        _part(direction, what, getattr(details, what))
    asked |= {what: getattr(details, what) for what in ("choose", "saved_bytes", "compiles")}
    for what, function in asked.items():  # while planning
        if function is not None and not callable(function):
            raise TypeError(f"fusion: {what} is a function of the match, got {function!r}; write a lambda")
    if not all(isinstance(node, Gradient) for node in details.gradients):
        raise TypeError(f"gradients are ops.base.Gradient(produces, reads, method), got {list(details.gradients)!r}")
    if not all(isinstance(dtype, torch.dtype) for dtype in details.takes_gradients_in):
        raise TypeError(f"takes_gradients_in are dtypes, got {', '.join(map(repr, details.takes_gradients_in))}")
    if any(g.wait or g.delayed for g in details.gradients):
        raise ValueError(
            "a node of a fusion is one step of its backward: only an op's gradient may start something and wait for it "
            "later, or be delayed"
        )
    if details.gives and not details.takes:
        raise ValueError("gives names what a plain function of tensors returns: name its arguments in takes")


def _as_declared(direction: str, named: dict[str, Sequence[str]], details: Details) -> dict[str, Any]:
    """Names and details as a Fusion has them."""
    by_default = {"forward": ("output",), "backward": ("input",), "joint": ("output", *named["saves"])}[direction]
    return {
        **{what: tuple(names) for what, names in named.items()},
        "takes": tuple(details.takes),
        "gives": tuple(details.gives) or (by_default if details.takes else ()),
        "gradients": tuple(details.gradients),
        "choose": details.choose,
        "saved_bytes": details.saved_bytes,
        "forward_ops": _part(direction, "forward_ops", details.forward_ops),
        "backward_ops": _part(direction, "backward_ops", details.backward_ops),
        "compiles": details.compiles,
        "takes_gradients_in": tuple(details.takes_gradients_in),
    }


def _directions(name: str, direction: str, body: Any, details: Details) -> tuple[Any, Any]:
    """Functions (or classes) that run forward and backward, of a body that was decorated."""
    apart = [] if details.choose else [node.method for node in details.gradients]
    missing = next((method for method in apart if not callable(getattr(body, method, None))), None)
    if missing is not None:
        raise ValueError(
            f"fusion {name!r}: it decorates a class with a static method {missing!r}, as its gradients say"
        )
    if direction != "joint":
        if not callable(body) or (isinstance(body, type) and not details.gradients):
            raise TypeError(f"fusion {name!r}: a {direction} fusion decorates a function, got {body!r}")
        return (body, None) if direction == "forward" else (None, body)
    forward = getattr(body, "forward", None)
    backward = body if details.gradients else getattr(body, "backward", None)
    if forward is None or backward is None:
        raise ValueError(
            f"fusion {name!r}: a joint fusion is a class with static methods forward and backward, or gradients"
        )
    return forward, backward
