"""Arguments of a run: settings that its checkpoint remembers, and where it runs; from the command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from gpt import Shape
from text import standard_library

RUNS = Path("runs")
CHECKPOINT = "checkpoint.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DTYPE_ON = {"cpu": "float32", "cuda": "bfloat16"}  # the faster one of each that trains as well


# Name -> the settings that differ from the defaults.
SIZES: dict[str, dict[str, Any]] = {
    "small": {},
    # 101 million parameters, for a GPU: some minutes on an H200.
    "large": {"layers": 8, "hidden": 1024, "heads": 8, "context": 1024, "batch": 32, "steps": 2000, "lr": 6e-4},
}


class BadArguments(Exception):
    """Arguments that cannot be met; the message says why, and what can be."""


@dataclass(frozen=True)
class Settings:
    """Settings that decide a run's losses; a resumed run keeps them."""

    layers: int = 4
    hidden: int = 128
    heads: int = 4
    context: int = 128
    dropout: float = 0.1
    batch: int = 16
    steps: int = 1000
    lr: float = 3e-3
    seed: int = 0
    dtype: str = "float32"
    precision: str = "dtype"
    validations: int = 8
    text: str = ""

    def __post_init__(self) -> None:
        for name in ("batch", "steps", "validations"):
            if getattr(self, name) < 1:
                raise BadArguments(f"--{name} must be 1 or more, got {getattr(self, name)}")
        if not self.lr > 0:
            raise BadArguments(f"--lr must be positive, got {self.lr}")
        try:
            self.shape  # noqa: B018 - made to be checked
        except ValueError as error:
            raise BadArguments(str(error)) from error

    @property
    def shape(self) -> Shape:
        """The model's part of it."""
        return Shape(self.layers, self.hidden, self.heads, self.context, self.dropout)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return DTYPES[self.dtype]

    def remembered(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


@dataclass(frozen=True)
class Arguments:
    """The command line: `chosen` holds only what was given."""

    chosen: Mapping[str, Any]
    device: torch.device
    kernels: str
    resume: bool
    compare: bool
    nudge: bool
    compile: bool
    explain: bool
    out: Path
    prompt: str
    temperature: float

    def settings(self) -> Settings:
        """Settings of a new run."""
        defaults = {"dtype": _DTYPE_ON[self.device.type], "text": str(standard_library())}
        return Settings(**{**defaults, **self.chosen})

    def resumed(self, saved: Mapping[str, Any]) -> Settings:
        """Settings of the run that is resumed.

        Raises:
            BadArguments: when others were given.
        """
        for name, value in self.chosen.items():
            before = saved.get(name, getattr(Settings, name))  # runs of before may lack a setting
            if value != before:
                raise BadArguments(
                    f"--{name} {value} differs from the run's {before}: a resumed run keeps its settings "
                    "(only --device and --kernels may change); leave it out, or start a new run without --resume"
                )
        return Settings(**saved)


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """The command line, checked.

    Raises:
        BadArguments: when it asks for what cannot be.
    """
    given = vars(_parser().parse_args(argv))
    explicit = {field.name: given[field.name] for field in fields(Settings) if field.name in given}
    chosen = {**SIZES[given["size"]], **explicit}
    if "text" in chosen:
        chosen["text"] = str(Path(chosen["text"]).resolve())  # a run may be resumed from another folder
    return Arguments(
        chosen,
        _device(given["device"]),
        given["kernels"],
        given["resume"],
        given["compare"],
        *(_of_twin(given, what) for what in ("nudge", "compile")),
        given["explain"],
        _folder(given),
        _prompt(given["prompt"]),
        _temperature(given["temperature"]),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a small GPT on the Python standard library's source, byte by byte, with te_fuser.",
        epilog="Ctrl-C saves the run and says how to go on.",
    )
    # Settings have no defaults here, so that a resumed run can tell what was given.
    group = parser.add_argument_group("the model")
    group.add_argument(
        "--size", choices=tuple(SIZES), default="small",
        help="all settings at once; those given beside it win (default: small; large: 101 M parameters, for a GPU)",
    )  # fmt: skip
    setting = _Setting(group)
    setting("layers", "blocks of attention and MLP")
    setting("hidden", "features of the residual stream")
    setting("heads", "attention heads; they divide hidden")
    setting("context", "bytes that the model sees at once")
    setting("dropout", "share of each branch's output that is dropped in training")
    setting = _Setting(parser.add_argument_group("training"))
    setting("batch", "windows of text in a step")
    setting("steps", "steps of the whole run; the learning rate's schedule spans them")
    setting("lr", "highest learning rate, after the warm-up")
    setting("seed", "of weights, batches and dropout; a run repeats exactly")
    setting("dtype", "of matrix products", choices=tuple(DTYPES), default="float32 on the CPU, bfloat16 on a GPU")
    setting("precision", "of what products multiply: that dtype, or fp8, 8 bits with scales", choices=("dtype", "fp8"))
    setting("validations", "how often the loss on the other files is taken, at equal distances")
    setting("text", "folder of .py files to read", default="the standard library's", metavar="FOLDER")

    place = parser.add_argument_group("where")
    place.add_argument("--device", default="cpu", choices=tuple(_DTYPE_ON), help="default: cpu")
    place.add_argument(
        "--kernels", default="auto", choices=("auto", "generated", "reference"),
        help="auto: generated kernels where they can be had; generated: an error where they cannot; "
        "reference: PyTorch operations (default: auto)",
    )  # fmt: skip
    place.add_argument(
        "--out", type=Path, metavar="FOLDER",
        help=f"the run's folder (default: {RUNS}/gpt, or the next one that is free; with --resume: the latest run)",
    )  # fmt: skip

    what = parser.add_argument_group("what else")
    what.add_argument("--resume", action="store_true", help="go on with a run that was stopped")
    what.add_argument("--compare", action="store_true", help="train the same model in torch.nn beside it")
    what.add_argument(
        "--nudge", action="store_true",
        help="with --compare: train that twin once more on the same batches, each of its first weights moved by one "
        "unit in the last place, to see how far apart rounding alone carries two runs",
    )  # fmt: skip
    what.add_argument("--compile", action="store_true", help="with --compare: train that twin by torch.compile, too")
    what.add_argument("--explain", action="store_true", help="print the plans of the whole model in full")
    what.add_argument("--prompt", default="import ", help="what the sample begins with (default: 'import ')")
    what.add_argument("--temperature", type=float, default=0.7, help="of the sample (default: 0.7)")
    return parser


class _Setting:
    """Adds options that are fields of Settings."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._fields = {field.name: field for field in fields(Settings)}

    def __call__(self, name: str, meaning: str, *, default: str | None = None, **options: Any) -> None:
        usual = self._fields[name].default
        if "choices" not in options:
            options.setdefault("metavar", "N" if isinstance(usual, int) else "X")
        self._group.add_argument(
            f"--{name}", type=type(usual), default=argparse.SUPPRESS,
            help=f"{meaning} (default: {default or usual})", **options,
        )  # fmt: skip


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise BadArguments("--device cuda: this PyTorch sees no CUDA device; leave it out to train on the CPU")
    return torch.device(name)


def _of_twin(given: dict[str, Any], what: str) -> bool:
    if given[what] and not given["compare"]:
        raise BadArguments(f"--{what} is about the twin that --compare trains: add --compare")
    return bool(given[what])


def _prompt(text: str) -> str:
    if not text:
        raise BadArguments("--prompt must not be empty: the model needs a byte to go on from")
    return text


def _temperature(value: float) -> float:
    if not value > 0:
        raise BadArguments(f"--temperature must be positive, got {value}")
    return value


def _folder(given: Mapping[str, Any]) -> Path:
    out: Path | None = given["out"]
    if given["resume"]:
        if given["compare"]:
            raise BadArguments("--compare trains both models from the start; it cannot be combined with --resume")
        return _run_to_resume(out)
    if out is None:
        return _free_folder()
    if out.exists() and not out.is_dir():
        raise BadArguments(f"--out {out} is no folder: name another")
    if (out / CHECKPOINT).exists():
        raise BadArguments(f"{out} holds a run already: add --resume to go on with it, or name another folder")
    return out


def _run_to_resume(out: Path | None) -> Path:
    if out is not None:
        if not (out / CHECKPOINT).exists():
            raise BadArguments(f"there is no {out / CHECKPOINT} to resume from")
        return out
    found = sorted(RUNS.glob(f"*/{CHECKPOINT}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise BadArguments(f"there is no run below {RUNS}/ to resume; name its folder by --out")
    return found[-1].parent


def _free_folder() -> Path:
    names = (RUNS / (f"gpt-{number}" if number > 1 else "gpt") for number in range(1, 10**6))
    return next(name for name in names if not (name / CHECKPOINT).exists())
