"""Verbs of the command te-fuser that take a model of the user's: explain, verify, bench.

A model is named as `file.py:name` or `package.module:name`; name is a function without arguments that gives it, or the
model itself. What is no list of te_fuser's is converted by `te_fuser.from_torch`, and the output says so; `explain`
takes models of transformers that `te_fuser.convert` has converted, too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from te_fuser.fuser.show.explain import Explanation

_WARM_UP, _CALLS = 3, 5


class UsageError(Exception):
    """Error that the command was told what cannot be, and says what to do. Exit status 2."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a model and its input."""
    parser.add_argument("model", metavar="MODEL", help="file.py:name or package.module:name, a function or a model")
    parser.add_argument("--input", required=True, metavar="SIZES", help="of its input: 8,128,512; ids: 8,128:int64")
    parser.add_argument("--dtype", help="of model and input, if not the model's own: bfloat16, ..")
    parser.add_argument("--json", action="store_true", help="print JSON")


@contextlib.contextmanager
def model_and_input(chosen: argparse.Namespace, device: str | None = None) -> Iterator[tuple[Any, torch.Tensor]]:
    """The named model, a list or a Conversion, and an input; inside, print() writes to stderr."""
    import torch

    from te_fuser.fake_tensors import NotSeenError

    with contextlib.redirect_stdout(sys.stderr), torch.set_grad_enabled(not getattr(chosen, "inference", False)):
        model, x = _model_and_input(chosen)
        if hasattr(model, "plans"):  # a module that only a real call can tell about: explain says so, bench needs none
            with _refusals(chosen), contextlib.suppress(NotSeenError):
                model.plans(x, device=device)
        yield model, x


@contextlib.contextmanager
def _refusals(chosen: argparse.Namespace) -> Iterator[None]:
    """Context in which these libraries' errors say that the input does not fit."""
    try:
        yield
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        cause: BaseException | None = error
        places = list[str]()
        while cause is not None:
            places += [f.f_globals.get("__name__", "").partition(".")[0] for f, _ in walk_tb(cause.__traceback__)]
            cause = cause.__cause__
        if places[-1] not in ("te_fuser", "torch", "transformers"):
            raise
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{chosen.model}, --input {chosen.input}: {words}") from error


def _model_and_input(chosen: argparse.Namespace) -> tuple[Any, torch.Tensor]:
    import torch

    from te_fuser.convert.conversion import _kind_of, conversion_of
    from te_fuser.from_torch import from_torch
    from te_fuser.sequential import Sequential

    sizes, _, own = chosen.input.partition(":")
    dtype = chosen.dtype and _dtype("--dtype", chosen.dtype)
    of_input = _dtype(f"--input {sizes}:", own) if own else dtype
    named = _named(chosen.model)
    conversion = None if isinstance(named, Sequential) else conversion_of(named)
    model = named if conversion is None else conversion.model
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{chosen.model} gives {type(model).__name__}: name a torch.nn.Module, or what gives one")
    place = "meta" if any(t.is_meta for t in model.parameters()) else "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(place, dtype) if dtype and dtype.is_floating_point else model.to(place)
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    chosen.dtype = chosen.dtype or str(first).removeprefix("torch.")
    try:
        x = torch.zeros([int(size) for size in sizes.split(",")], dtype=of_input or first, device=place)
    except (TypeError, ValueError, RuntimeError) as error:
        words = "give sizes with commas between them, as 8,128,512, of a tensor that fits into memory"
        raise UsageError(f"--input {chosen.input}: {words}") from error
    if x.is_floating_point():
        x = torch.randn(x.shape, device=place).to(x.dtype).requires_grad_()
    if isinstance(named, Sequential):
        return named, x
    if conversion is not None or any(_kind_of(type(m)) for m in model.modules()):
        for wrong, words in (
            (chosen.command != "explain", "te_fuser.convert checks them; time the model's own calls"),
            (conversion is None, "call te_fuser.convert(model) before the model is returned"),
            (x.is_floating_point() and hasattr(model, "get_input_embeddings"), f"give ids, --input {sizes}:int64"),
            (x.is_meta, 'they run once: build it on a device, torch.device("cpu") in place of torch.device("meta")'),
            (getattr(chosen, "passes", False), "leave --passes out"),
        ):
            if wrong:
                raise UsageError(f"{chosen.model} has layers of transformers: {words}")
        lists = [f"{path}." for path, m in model.named_modules() if isinstance(m, Sequential)]
        for path in (path for path in lists if not path[:-1].startswith(tuple(lists))):
            print(f"{path[:-1]} is a list, not shown here: have {chosen.model} return it to see it", file=sys.stderr)
        return conversion, x
    with _refusals(chosen):
        made = from_torch(model, x.detach())
    print(f"{type(model).__name__} converted by te_fuser.from_torch", file=sys.stderr)
    return (made if isinstance(made, Sequential) else Sequential(made)), x


def _dtype(option: str, name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex or (dtype.is_floating_point and dtype.itemsize < 2):
        raise UsageError(f"{option} {name} is no dtype of a model: give float32, bfloat16, float16, float64 or int64")
    return dtype


def _named(text: str) -> Any:
    import torch

    place, _, name = text.rpartition(":")
    if not place or not name:
        raise UsageError(f"{text!r} names no model: write file.py:name or package.module:name")
    own, sys.argv = sys.argv, [place]  # a script that reads its arguments when it is imported finds none
    try:
        found = getattr(_module(place), name, None)
        if found is None:
            raise UsageError(f"{place} has no {name!r}")
        if not callable(found) or isinstance(found, torch.nn.Module):
            return found
        with contextlib.suppress(ValueError):  # some of C have no signature
            try:
                inspect.signature(found).bind()
            except TypeError as error:
                raise UsageError(f"{text} takes arguments ({error}): name a function without") from error
        return found()
    except SystemExit as error:
        raise UsageError(f"{text} ends the process, with status {error.code}, before there is a model") from error
    finally:
        sys.argv = own


def _module(place: str) -> ModuleType:
    path = Path(place).resolve()
    if path.suffix != ".py":
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UsageError(f"there is no module {place!r}: {error}") from error
    if not path.is_file():
        raise UsageError(f"there is no file {place}")
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file():  # a file of a package may import its neighbours
        folder, name = folder.parent, f"{folder.name}.{name}"
    sys.path.insert(0, str(folder))
    if "." in name:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)  # where its dataclasses look
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------- explain


def explain_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--device", help="plan for this one, which need not be here: te-fuser devices lists them")
    parser.add_argument("--inference", action="store_true", help="without gradients")
    parser.add_argument("--details", action="store_true", help="bytes, what is kept, and why fusions were not taken")
    parser.add_argument("--passes", action="store_true", help="what each pass of planning changed, too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")


def explain(chosen: argparse.Namespace) -> int:
    from te_fuser.convert.conversion import Conversion

    with model_and_input(chosen, chosen.device) as (model, x):
        asked = {"passes": True} if chosen.passes else {}  # which a converted model does not take
        with _refusals(chosen):
            found = model.explain(x, device=chosen.device, details=chosen.details, **asked)
            told: list[tuple[list[str], Explanation]] = [([], found)]
            if chosen.json and isinstance(model, Conversion):  # its text has headings: data names all equal layers
                told = model.explain_layers((x,), {}, device=chosen.device)
    if chosen.html:
        try:
            print(f"{found.to_html(chosen.html)}", file=sys.stderr)
        except OSError as error:
            raise UsageError(f"--html {chosen.html}: {error.strerror}") from error
    if chosen.json:
        plans, between = [], []
        for paths, one in told:
            at = {"path": paths[0], "layers": paths} if paths else {}
            plans += [{**at, **plan} for plan in plans_as_data(one)]
            between += [f"In {paths[0]}: {text}" if paths else text for _, text in one.borders]
        unseen = "; ".join(filter(None, (one.unseen for _, one in told)))
        print(json.dumps({"plans": plans, "by_itself": between, "unseen": unseen}, indent=1))
    elif not chosen.html:
        print(found)
    return 0


def plans_as_data(explanation: Explanation) -> list[dict[str, Any]]:
    """Plans as lists and numbers: seconds, bytes."""
    from te_fuser.fuser.show.step_rows import rows_of

    found = []
    for plan in explanation.plans:
        data: dict[str, Any] = {"device": plan.device.name, "memory": plan.memory, "kept_bytes": plan.kept_bytes()}
        for direction, rows in rows_of(plan).items():
            data[direction] = [
                {"step": row.name, "kind": row.what, "ops": list(row.covers), "seconds": row.seconds, "read": row.read,
                 "written": row.written, "limit": row.limit, "share": row.share}
                for row in rows
            ]  # fmt: skip
        data["refused"] = [
            {"fusion": r.name, "direction": r.direction, "ops": [r.start, r.stop - 1], "reason": r.reason}
            for r in plan.refusals
        ]
        found.append(data)
    return found


# -------------------------------------------------------------------------------------------------------- verify


def verify_model(chosen: argparse.Namespace) -> int:
    """Exit status 1 where something differs."""
    from te_fuser.verify import verify

    with model_and_input(chosen) as (model, x), _refusals(chosen):  # what the model itself raises is in the report
        report = verify(model, x, raise_on_failure=False)
    if chosen.json:
        print(json.dumps({"passed": report.passed, "report": str(report)}, indent=1))
    else:
        print(report)
    return 0 if report.passed else 1


# --------------------------------------------------------------------------------------------------------- bench


def bench_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--rounds", type=int, default=9, help="in which all take turns; the median counts (usual: 9)")
    parser.add_argument("--inference", action="store_true", help="forward alone, without gradients")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a picture, by matplotlib")


def bench(chosen: argparse.Namespace) -> int:
    """Milliseconds of a call of each way: op by op, compiled, and te_fuser."""
    import torch

    if chosen.rounds < 1:
        raise UsageError(f"--rounds {chosen.rounds}: give 1 or more")
    figure = _figure(chosen.plot) if chosen.plot else None
    left_out: dict[str, str] = {}
    with model_and_input(chosen) as (model, x):
        ways: dict[str, Callable[[torch.Tensor], Any]] = {"eager": model.reference}
        if not chosen.no_compile:
            ways["torch.compile"] = torch.compile(model.reference)
        for name in list(ways):
            try:
                _call(ways[name], x, model)
            except Exception as error:  # of another library, whatever it raises
                left_out[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                del ways[name]
        times = _times(ways | {"te_fuser": model}, x, model, chosen.rounds)
    if chosen.json:
        print(json.dumps({"milliseconds": times, "left_out": left_out}, indent=1))
    else:
        for name, taken in times.items():
            print(f"{name:<14} {taken:10.3f} ms  {taken / times['te_fuser']:6.2f} of te_fuser's")
        for name, why in left_out.items():
            print(f"{name:<14} left out: {why}")
    if figure is not None:
        axes = figure.add_subplot()
        bars = axes.barh(list(times)[::-1], list(times.values())[::-1], color="#3f6fa3")
        axes.bar_label(bars, fmt="%.3f", padding=3)
        axes.set_xlabel(f"ms a call of {chosen.model}, {chosen.input} {chosen.dtype}")
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(chosen.plot)
        print(f"{chosen.plot}", file=sys.stderr)
    return 0


def _call(way: Callable[[torch.Tensor], Any], x: torch.Tensor, model: Any) -> None:
    import torch

    model.zero_grad(set_to_none=True)
    x.grad = None
    made = way(x)
    ends = [y for y in (made if isinstance(made, tuple) else (made,)) if y is not None and y.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(y) for y in ends])
    if x.is_cuda:
        torch.cuda.synchronize()


def _times(ways: dict[str, Callable[[torch.Tensor], Any]], x: torch.Tensor, model: Any, count: int) -> dict[str, float]:
    """Medians over rounds in which the ways take turns."""
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(_WARM_UP):
            _call(way, x, model)
    for _ in range(count):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(_CALLS):
                _call(way, x, model)
            rounds[name].append((time.perf_counter() - start) / _CALLS)
    return {name: 1e3 * statistics.median(found) for name, found in rounds.items()}


def _figure(path: Path) -> Any:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError('--plot needs matplotlib: pip install "te-fuser[examples]"') from error
    figure = Figure(figsize=(6, 2), layout="constrained")
    try:
        figure.savefig(path)  # before time is spent on what cannot be written
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot {path}: {error}") from error
    return figure
