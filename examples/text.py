"""Text to train on: Python source files, read as bytes, split into training and validation by file.

Every machine that runs this has some: the standard library's own source.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

VOCABULARY = 256  # bytes
MOST_BYTES = 12_000_000
VALIDATION_SHARE = 10  # one file in so many

# Tests, what was installed, and tables that were generated rather than written.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data"}
_SKIPPED_PREFIX = "_sysconfigdata"


@dataclass(frozen=True)
class Text:
    """Both splits as one-dimensional uint8 tensors."""

    folder: Path
    training: torch.Tensor
    validation: torch.Tensor
    training_files: int
    validation_files: int

    @property
    def fingerprint(self) -> str:
        """A digest of all bytes, so that a resumed run can tell whether it reads the same text."""
        digest = hashlib.sha256()
        for part in (self.training, self.validation):
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()[:16]

    def __str__(self) -> str:
        return (
            f"{self.training.numel() / 1e6:.2f} MB in {self.training_files} files to train on, "
            f"{self.validation.numel() / 1e6:.2f} MB in {self.validation_files} files to validate with"
        )


def standard_library() -> Path:
    """The folder of this Python's own source files."""
    return Path(sysconfig.get_path("stdlib"))


def read_text(folder: Path, most_bytes: int = MOST_BYTES) -> Text:
    """Read the .py files below `folder` in the order of their paths, until there are `most_bytes`.

    A file's split depends on its own path alone, so more or other files beside it do not move it.

    Raises:
        FileNotFoundError: when the folder holds too few files to fill both splits.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    total = 0
    for path in _source_files(folder):
        content = path.read_bytes()
        total += len(content)
        if total > most_bytes:
            break
        parts[_validates(path.relative_to(folder))].append(content)
    if not all(any(files) for files in parts.values()):
        raise FileNotFoundError(f"{folder} holds too few .py files to train and validate with; name another by --text")
    return Text(folder, _tensor(parts[False]), _tensor(parts[True]), len(parts[False]), len(parts[True]))


def _source_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        name = path.relative_to(folder)
        if not _SKIPPED_FOLDERS.intersection(name.parts[:-1]) and not name.name.startswith(_SKIPPED_PREFIX):
            yield path


def _validates(name: Path) -> bool:
    return zlib.crc32(name.as_posix().encode()) % VALIDATION_SHARE == 0


def _tensor(files: list[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------- windows


@dataclass(frozen=True)
class Windows:
    """Stretches of text and the byte that follows each of theirs: [windows, context], int64."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def batches(self, size: int) -> Iterator[Windows]:
        """At most `size` windows at a time."""
        for inputs, targets in zip(self.inputs.split(size), self.targets.split(size), strict=True):
            yield Windows(inputs, targets)


def windows_at(data: torch.Tensor, starts: torch.Tensor, context: int) -> Windows:
    """The windows of `data` that begin at `starts`."""
    positions = starts.to(data.device)[:, None] + torch.arange(context + 1, device=data.device)
    pieces = data[positions].long()
    return Windows(pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous())


def random_windows(data: torch.Tensor, count: int, context: int, generator: torch.Generator) -> Windows:
    """`count` windows from anywhere; the generator is the CPU's, so every device sees the same ones."""
    return windows_at(data, torch.randint(data.numel() - context, (count,), generator=generator), context)


def spread_windows(data: torch.Tensor, count: int, context: int) -> Windows:
    """`count` windows at equal distances, fewer where they would overlap."""
    fitting = max(1, (data.numel() - 1) // context)
    starts = torch.linspace(0, data.numel() - context - 1, min(count, fitting)).long()
    return windows_at(data, starts, context)


# -------------------------------------------------------------------------------------------------- bigram


class Bigram:
    """The baseline: how likely a byte is after the one before it, counted over the training text.

    p(b | a) = (count(a, b) + smoothing) / (count(a) + 256 * smoothing)
    """

    def __init__(self, data: torch.Tensor, smoothing: float = 0.1) -> None:
        pairs = data[:-1].long() * VOCABULARY + data[1:].long()
        counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY).double() + smoothing
        self.log_probabilities = (counts / counts.sum(1, keepdim=True)).log()

    def loss(self, windows: Windows) -> float:
        """The mean of -log p(target | input), in nats for each byte."""
        return -self.log_probabilities[windows.inputs.cpu(), windows.targets.cpu()].mean().item()
