"""The pictures of a GPU's record: time over the floor, growth, losses. The same record gives the same files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu.record.records import origin

IMAGES = ROOT / "docs/images"

Data = Mapping[str, Any]

_COLOURS = {"eager": "#9aa5b1", "torch.compile": "#5c7fa3", "te_fuser": "#d1495b"}
_OTHER = "#c9ba9b"


def write_plots(record: Data, ranks: Sequence[Data] = (), folder: Path = IMAGES) -> None:
    """Every picture that the record has numbers for, and the one of ranks that share a layer; no quick runs."""
    for dark in (False, True):
        plot_summary(record, ranks, folder / f"summary-{'dark' if dark else 'light'}.svg", dark)
    plot_floor(record, folder / "gpu.svg")
    plot_growth(record, folder / "gpu-growth.svg")
    plot_losses(record, folder / "gpu-loss.svg")
    plot_fp8_losses(record, folder / "gpu-fp8-loss.svg")
    for shared in ranks:
        plot_timeline(shared, folder / "ranks-timeline.svg")


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # needs no display, and takes a second to import

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Any, path: Path) -> None:
    """As SVG without anything that differs from one time to the next."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "te_fuser"}):
        figure.savefig(path, metadata={"Date": None})


def _full_run(record: Data, name: str) -> Data | None:
    """A part, if it was measured, and not in a quick run."""
    part = record["parts"].get(name)
    return None if part is None or part["options"]["quick"] else part


# ------------------------------------------------------------------------------------------- time over the floor

_COMPARED = ("layer", "layer-fp16", "mlp", "llama")


def plot_floor(record: Data, path: Path) -> None:
    """Time over the floor of every layer and block, by contender: a picture for the README."""
    parts = [part for name in _COMPARED if (part := _full_run(record, name))]
    cases = [(entry, part) for part in parts for entry in part["cases"]]
    bars = [bar for entry, part in reversed(cases) for bar in _bars(entry, part)]
    if not bars:
        return
    figure = _figure(8, 0.9 + 0.22 * len(bars))
    axes = figure.add_subplot()
    for k, (label, ratio, colour, hatch) in enumerate(bars):
        if ratio is not None:
            axes.barh(k, ratio - 1, left=1, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
            axes.text(max(ratio, 1) + 0.002, k, f"{ratio:.3f}", va="center", fontsize=8)
        else:
            place = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
            axes.annotate(label, (1, k), fontsize=9, fontweight="bold", **place)
    axes.set_yticks(range(len(bars)), ["" if ratio is None else label for label, ratio, *_ in bars], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=1)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    what = "time over the floor (products and attention alone)"
    figure.supxlabel(f"{what}, forward + backward, {record['gpu']}", fontsize="medium")  # the labels are wide
    _save(figure, path)


# Case of the summary -> the part and the entry that has it, and the contenders shown, by their names there and here.
_EAGER_AND_COMPILED = {"eager": "eager PyTorch", "torch.compile": "torch.compile", "te_fuser": "te_fuser"}
_SUMMARY: dict[str, tuple[str, str, Mapping[str, str]]] = {
    "GPT layer": ("layer", "dropout 0.1", _EAGER_AND_COMPILED),
    "Llama layer": ("llama", "Llama layer", _EAGER_AND_COMPILED),
    "RMSNorm-SwiGLU MLP": ("mlp", "RMSNorm-SwiGLU", _EAGER_AND_COMPILED),
    "GPT layer on 2 GPUs": (
        "layer", "on 2 ranks",
        {"Megatron style": "Megatron style", "DTensor, async TP": "DTensor, async TP", "te_fuser": "te_fuser"},
    ),
}  # fmt: skip


def plot_summary(record: Data, ranks: Sequence[Data], path: Path, dark: bool) -> None:
    """A few cases for the README, each beside two ways of PyTorch, for a light or a dark page."""
    found: list[tuple[str, dict[str, float]]] = []
    for title, (name, case, shown) in _SUMMARY.items():
        parts = [part for r in (record, *ranks) if (part := _full_run(r, name))]
        entries = [entry for part in parts for entry in part["cases"] if case in entry["case"]]
        contenders = entries[0]["contenders"] if entries else {}
        bars = {label: contenders[who]["over_floor"] for who, label in shown.items() if who in contenders}
        if bars:
            found.append((title, bars))
    if not found:
        return
    text, ours, others = ("#e6edf3", "#f2788a", "#7d8590") if dark else ("#1f2328", "#d1495b", "#9aa5b1")
    figure = _figure(8, 0.7 + 1.05 * len(found))
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    labels, row = [], 0.0
    for title, bars in reversed(found):
        for label, ratio in reversed(bars.items()):
            axes.barh(row, ratio, color=ours if label == "te_fuser" else others, height=0.85)
            axes.text(ratio + 0.01, row, f"{ratio:.2f}", va="center", fontsize=11, color=text)
            labels.append((row, label))
            row += 1
        axes.text(0, row - 0.1, title, fontsize=12, fontweight="bold", color=text, va="center")
        row += 1.1
    axes.set_ylim(-0.7, row - 0.6)
    axes.axvline(1, color=text, linewidth=1, linestyle=":")
    axes.set_yticks(*zip(*labels, strict=True), fontsize=11, color=text)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.08 * max(ratio for _, bars in found for ratio in bars.values()))
    axes.spines[:].set_visible(False)
    figure.supxlabel(
        f"time over products and attention alone (1, dotted), forward + backward, bfloat16, {record['gpu']}",
        fontsize=11, color=text,
    )  # fmt: skip
    _save(figure, path)


def _bars(entry: Data, part: Data) -> list[tuple[str, float | None, str, str]]:
    """(label, ratio, colour, hatch) of one case, from below; the case's name has no ratio."""
    found = {name: (data["over_floor"], "") for name, data in entry["contenders"].items() if name != "floor"}
    for name, ratio in entry.get("earlier", {}).get("over_floor", {}).items():
        found[f"{name} (earlier)"] = (ratio, "////")
    bars: list[tuple[str, float | None, str, str]] = [
        (name, ratio, _COLOURS.get(name.split()[0], _OTHER), hatch) for name, (ratio, hatch) in found.items()
    ]
    order: Callable[[Any], float] = lambda bar: bar[1]  # noqa: E731
    return [*sorted(bars, key=order), (f"{entry['case']} ({origin(part)})", None, "", "")]


# -------------------------------------------------------------------------------------------------------- growth

_GROWING = {"tokens": "tokens, {hidden} features", "hidden": "features, {tokens} tokens"}  # what grows, what does not


def plot_growth(record: Data, path: Path) -> None:
    """Time over the floor, and memory over eager's, of the seed layer against tokens and against features."""
    part = _full_run(record, "growth")
    columns = {what: [e for e in part["cases"] if e["grows"] == what] for what in _GROWING} if part else {}
    columns = {what: entries for what, entries in columns.items() if entries}
    if part is None or not columns:
        return
    figure = _figure(8, 4.8)
    widths = [len(entries) + 1 for entries in columns.values()]
    grid = figure.subplots(2, len(columns), squeeze=False, sharex="col", sharey="row", width_ratios=widths)
    for (times, memory), (what, entries) in zip(grid.T, columns.items(), strict=True):
        sizes = [entry[what] for entry in entries]
        _lines(times, sizes, _ratios(entries))
        _lines(memory, sizes, _memory_ratios(entries))
        memory.set_xscale("log", base=2)
        memory.set_xticks(sizes, [_short(size) for size in sizes])
        memory.set_xlabel(_GROWING[what].format_map(entries[0]))
    grid[0, 0].set_ylabel("time over the floor")
    grid[1, 0].set_ylabel("memory over eager's")
    for axes in grid[:, 0]:
        axes.legend(fontsize=8, frameon=False)
    title = f"seed layer bf16 dropout 0.1, forward + backward, {record['gpu']} ({origin(part)})"
    figure.suptitle(title, fontsize="medium")
    _save(figure, path)


Line = tuple[str, Sequence[float], dict[str, Any]]  # label, a value for each size, style


def _ratios(entries: Sequence[Data]) -> list[Line]:
    """Times over the floor."""
    return [
        (name, [e["contenders"][name]["over_floor"] for e in entries], {"color": _COLOURS[name]})
        for name in ("eager", "te_fuser")
    ]


def _memory_ratios(entries: Sequence[Data]) -> list[Line]:
    """te_fuser's memory over eager's: the most that a step needs, and what is kept for backward."""
    styles: dict[str, dict[str, Any]] = {"peak": {}, "kept": {"linestyle": "--", "markerfacecolor": "white"}}
    return [
        (
            f"te_fuser, {what}",
            [e["contenders"]["te_fuser"][f"{what}_mib"] / e["contenders"]["eager"][f"{what}_mib"] for e in entries],
            {"color": _COLOURS["te_fuser"], **style},
        )
        for what, style in styles.items()
    ]


def _lines(axes: Any, sizes: Sequence[int], lines: Sequence[Line]) -> None:
    """Over a line at 1."""
    axes.axhline(1, color="black", linewidth=0.8)
    for label, values, style in lines:
        axes.plot(sizes, values, label=label, marker="o", markersize=4, **style)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def _short(size: int) -> str:
    return f"{size // 1024}k" if size % 1024 == 0 else str(size)


# -------------------------------------------------------------------------------------------------------- losses

_TRAINED = {"train": "dropout {dropout:g}", "train-exact": "without dropout"}
_TWIN = "torch.nn"
_IN_BFLOAT16 = "te_fuser, bfloat16"


def plot_losses(record: Data, path: Path) -> None:
    """The loss curves of the training example beside eager's, and how far each lies from it."""
    parts = {name: part for name in _TRAINED if (part := _full_run(record, name))}
    if not parts:
        return
    figure = _figure(8, 5)
    grid = figure.subplots(2, len(parts), squeeze=False, sharex="col", sharey="row", height_ratios=(3, 2))
    for (losses, differences), (name, part) in zip(grid.T, parts.items(), strict=True):
        (entry,) = part["cases"]
        _loss_curves(losses, entry)
        _loss_differences(differences, entry)
        title = _TRAINED[name].format_map(entry["settings"])
        losses.set_title(f"{title} ({origin(part)})", fontsize=9)
        differences.set_xlabel("step")
    grid[0, 0].set_ylim(top=1.6 * entry["bigram_loss"])  # the first steps, at 5.5, say nothing
    grid[0, 0].set_ylabel("loss, nats per byte")
    grid[1, 0].set_ylabel("minus eager's")
    with_points = any("validation_steps" in part["cases"][0] for part in parts.values())
    what = "training loss (lines) and validation loss (points)" if with_points else "training loss"
    figure.suptitle(f"{what}, {record['gpu']}", fontsize="medium")
    _save(figure, path)


def plot_fp8_losses(record: Data, path: Path) -> None:
    """The loss curves of the training example in FP8 and in bfloat16, and how far they lie apart."""
    part = _full_run(record, "train-fp8")
    if part is None:
        return
    (entry,) = part["cases"]
    figure = _figure(8, 5)
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _loss_curves(losses, entry)
    _loss_differences(differences, entry, _IN_BFLOAT16)
    losses.set_ylim(top=1.6 * entry["bigram_loss"])
    losses.set_ylabel("loss, nats per byte")
    differences.set_ylabel("minus bfloat16's")
    differences.set_xlabel("step")
    what = "training loss (lines) and validation loss (points) in FP8 and in bfloat16"
    figure.suptitle(f"{what}, {record['gpu']} ({origin(part)})", fontsize="medium")
    _save(figure, path)


def _loss_curves(axes: Any, entry: Data) -> None:
    axes.axhline(entry["bigram_loss"], color="black", linestyle=":", linewidth=0.8, label="bigram model")
    for name, data in reversed(entry["contenders"].items()):  # te_fuser's over the others
        style = _style(name)
        axes.plot(*zip(*data["training_losses"], strict=True), label=_label(name), **style)
        if "validation_steps" in entry:
            axes.plot(entry["validation_steps"], data["validation_losses"], "o", color=style["color"], markersize=4)
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)


def _loss_differences(axes: Any, entry: Data, than: str = _TWIN) -> None:
    curves = {name: dict(data["training_losses"]) for name, data in entry["contenders"].items()}
    twin = curves[than]
    for name, curve in reversed(curves.items()):
        axes.plot(list(twin), [curve[step] - loss for step, loss in twin.items()], **_style(name))
    _plain(axes)


def _label(name: str) -> str:
    return name.replace(_TWIN, "eager")


def _style(name: str) -> dict[str, Any]:
    """The line that another is held against is wide, so that another on it leaves it seen."""
    return {"color": _COLOURS.get(_label(name), _OTHER), "linewidth": 2.5 if name in (_TWIN, _IN_BFLOAT16) else 1.2}


# ------------------------------------------------------------------------------------------------- timeline

_KINDS = {"products": "#5c7fa3", "attention": "#7a6ba8", "rest": "#9aa5b1", "copy": "#c9ba9b", "exchange": "#d1495b"}


def plot_timeline(record: Data, path: Path) -> None:
    """Kernels of a GPU in a step that ranks share, below exchanges and copies; a pair of rows for each way."""
    part = _full_run(record, "timeline")
    ways = {name: data["events"] for name, data in part["cases"][0]["contenders"].items()} if part else {}
    if not any(ways.values()):
        return
    figure = _figure(10, 1.0 + 1.1 * len(ways))
    axes = figure.subplots(len(ways), sharex=True, squeeze=False)[:, 0]
    for ax, (name, events) in zip(axes, ways.items(), strict=True):
        took = max(begin + length for begin, length, *_ in events) / 1e3
        for kind, colour in _KINDS.items():
            row = 1 if kind in ("exchange", "copy") else 0
            spans = [(begin / 1e3, length / 1e3) for begin, length, what, _ in events if what == kind]
            ax.broken_barh(spans, (row + 0.1, 0.8), color=colour, label=kind, linewidth=0)
        ax.set_title(f"{name}: {took:.2f} ms", fontsize=9, loc="left")
        ax.set_yticks([0.5, 1.5], ["kernels", "exchanges"], fontsize=8)
        ax.spines[["top", "right", "left"]].set_visible(False)
        ax.tick_params(axis="y", length=0)
    axes[0].legend(ncols=len(_KINDS), fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1))
    label = f"ms of a step of the seed layer on one of {part['ranks']} ranks, {record['gpu']}"
    figure.supxlabel(label, fontsize="medium")
    _save(figure, path)
