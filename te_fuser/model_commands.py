"""Verbs of the command te-fuser that take a model of the user's: explain, verify, bench.

A model is named as `file.py:name` or `package.module:name`; name is a function without arguments that gives it, or the
model itself. What is no list of te_fuser's is converted by `te_fuser.from_torch`, and the output says so.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from te_fuser.fuser.show.explain import Explanation

_WARM_UP, _CALLS = 3, 5


class UsageError(Exception):
    """Something that the command was told and that cannot be; the message says what to do. Exit status 2."""


def add_model(parser: argparse.ArgumentParser) -> None:
    """The arguments that name a model and its input."""
    parser.add_argument("model", metavar="MODEL", help="file.py:name or package.module:name, a function or a model")
    parser.add_argument("--input", required=True, metavar="SIZES", help="of the model's input: 8,128,512")
    parser.add_argument("--dtype", default="float32", help="of model and input: float32, bfloat16, ..; int64: ids")
    parser.add_argument("--json", action="store_true", help="print JSON")


def model_and_input(chosen: argparse.Namespace, device: str | None = None) -> tuple[Any, torch.Tensor]:
    """The model that was named, as a list of te_fuser's, and an input for it.

    Raises:
        UsageError: where there is no such model, or it cannot be converted.
    """
    import torch

    from te_fuser.from_torch import from_torch
    from te_fuser.sequential import Sequential

    dtype = getattr(torch, chosen.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(
            f"--dtype {chosen.dtype} is none of torch's: give float32, bfloat16, float16, float64 or int64"
        )
    model = _named(chosen.model)
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{chosen.model} gives {type(model).__name__}: name a torch.nn.Module, or a function that does"
        )
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = model.to(place, dtype) if dtype.is_floating_point else model.to(place)
    sizes = _sizes(chosen.input)
    x = torch.randn(sizes, device=place).to(dtype) if dtype.is_floating_point else torch.zeros(sizes, dtype=dtype)
    x = x.to(place).requires_grad_(dtype.is_floating_point)
    if isinstance(model, Sequential):
        return model, x
    try:
        made = from_torch(model, x.detach())
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{chosen.model} is no te_fuser.Sequential, and from_torch does not take it: {error}"
        ) from error
    print(f"{type(model).__name__} converted by te_fuser.from_torch", file=sys.stderr)
    return (made if isinstance(made, Sequential) else Sequential(made)), x


def _sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise UsageError(f"--input {text}: give sizes with commas between them, as 8,128,512") from None


def _named(text: str) -> Any:
    place, colon, name = text.rpartition(":")
    if not colon or not name:
        raise UsageError(f"{text!r} names no model: write file.py:name or package.module:name")
    found = getattr(_module(place), name, None)
    if found is None:
        raise UsageError(f"{place} has no {name!r}")
    return found if hasattr(found, "parameters") or not callable(found) else found()


def _module(place: str) -> ModuleType:
    path = Path(place)
    if path.suffix != ".py":
        sys.path.insert(0, "")
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise UsageError(f"there is no module {place!r}: {error}") from error
    if not path.is_file():
        raise UsageError(f"there is no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------------------------------------------- explain


def explain_options(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--device", help="plan for this one, which need not be here: te-fuser devices lists them")
    parser.add_argument("--inference", action="store_true", help="without gradients")
    parser.add_argument("--passes", action="store_true", help="what each pass of planning changed, too")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")


def explain(chosen: argparse.Namespace) -> int:
    import torch

    model, x = model_and_input(chosen)
    with torch.set_grad_enabled(not chosen.inference):
        try:
            found = model.explain(x, device=chosen.device, passes=chosen.passes)
        except ValueError as error:
            raise UsageError(str(error)) from error
    if chosen.html:
        print(f"{found.to_html(chosen.html)}", file=sys.stderr)
    if chosen.json:
        print(json.dumps({"plans": plans_as_data(found)}, indent=1))
    elif not chosen.html:
        print(found)
    return 0


def plans_as_data(explanation: Explanation) -> list[dict[str, Any]]:
    """Plans as lists and numbers: seconds, bytes."""
    from te_fuser.fuser.show.step_rows import step_rows

    found = []
    for plan in explanation.plans:
        data: dict[str, Any] = {"device": plan.device.name, "memory": plan.memory, "kept_bytes": plan.kept_bytes()}
        for direction in ("forward", "backward"):
            data[direction] = [
                {"step": row.name, "kind": row.what, "ops": list(row.covers), "seconds": row.seconds, "read": row.read,
                 "written": row.written, "limit": row.limit, "share": row.share}
                for row in step_rows(plan, direction)
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

    model, x = model_and_input(chosen)
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

    model, x = model_and_input(chosen)
    ways: dict[str, Callable[[torch.Tensor], Any]] = {"eager": model.reference}
    if not chosen.no_compile:
        ways["torch.compile"] = torch.compile(model.reference)
    ways["te_fuser"] = model
    left_out: dict[str, str] = {}
    for name in [name for name in ways if name != "te_fuser"]:
        try:
            _call(ways[name], x, model, chosen.inference)
        except Exception as error:  # of another library, whatever it raises
            left_out[name] = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            del ways[name]
    times = _times(ways, x, model, chosen)
    if chosen.json:
        print(json.dumps({"milliseconds": times, "left_out": left_out}, indent=1))
    else:
        for name, taken in times.items():
            print(f"{name:<14} {taken:10.3f} ms  {taken / times['te_fuser']:6.2f} of te_fuser's")
        for name, why in left_out.items():
            print(f"{name:<14} left out: {why}")
    if chosen.plot:
        _plot(times, chosen)
    return 0


def _call(way: Callable[[torch.Tensor], Any], x: torch.Tensor, model: Any, inference: bool) -> None:
    import torch

    with torch.set_grad_enabled(not inference):
        model.zero_grad(set_to_none=True)
        x.grad = None
        y = way(x)
        if not inference:
            y.backward(torch.ones_like(y))
    if x.is_cuda:
        torch.cuda.synchronize()


def _times(
    ways: dict[str, Callable[[torch.Tensor], Any]], x: torch.Tensor, model: Any, chosen: argparse.Namespace
) -> dict[str, float]:
    """Medians over rounds in which the ways take turns."""
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(_WARM_UP):
            _call(way, x, model, chosen.inference)
    for _ in range(chosen.rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(_CALLS):
                _call(way, x, model, chosen.inference)
            rounds[name].append((time.perf_counter() - start) / _CALLS)
    return {name: 1e3 * statistics.median(found) for name, found in rounds.items()}


def _plot(times: dict[str, float], chosen: argparse.Namespace) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise UsageError('--plot needs matplotlib: pip install "te-fuser[examples]"') from error
    figure = Figure(figsize=(6, 0.8 + 0.4 * len(times)), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(list(times)[::-1], list(times.values())[::-1], color="#3f6fa3")
    axes.bar_label(bars, fmt="%.3f", padding=3)
    axes.set_xlabel(f"ms a call of {chosen.model}, {chosen.input} {chosen.dtype}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(chosen.plot)
    print(f"{chosen.plot}", file=sys.stderr)
