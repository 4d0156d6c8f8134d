"""Contenders of a case: te_fuser, eager PyTorch, torch.compile, and other libraries where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.contest import libraries
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entries import OURS, why
from benchmarks.models import Pair, Rival, rivals


@dataclass
class Entrants:
    """Contenders, and those left out: a rival that fails must not take the others' numbers along."""

    bench: Bench
    found: dict[str, Rival]
    left_out: dict[str, str] = field(default_factory=dict)
    tuning: str = ""

    @classmethod
    def of(cls, bench: Bench, pair: Pair, dtype: torch.dtype) -> Entrants:
        """Eager PyTorch and te_fuser.

        Raises:
            RuntimeError: when they compute the same thing and yet differ.
        """
        return cls(bench, rivals(pair, dtype, bench.device))

    @property
    def eager(self) -> Rival:
        """PyTorch's."""
        return self.found["eager"]

    @property
    def ours(self) -> Rival:
        """te_fuser's, with the default plan."""
        return self.found[OURS]

    def add(self, name: str, make: Callable[[], Rival], direction: str = "forward+backward") -> None:
        """Make a contender and let it run once, in a direction."""
        card = self.bench.card
        card.synchronize()  # what an earlier one did wrong is not this one's
        try:
            rival = make()
            rival.runner(direction)()
            card.synchronize()
        except Exception as error:
            self.left_out[name] = why(error)
        else:
            self.found[name] = rival

    def add_compiled(self, direction: str = "forward+backward", name: str = "torch.compile", **options: Any) -> None:
        """Eager's model by torch.compile, where it takes part."""
        if self.bench.with_compile:
            self.add(name, lambda: self.eager.like(self.bench.compiled(self.eager.model, **options)), direction)

    def add_libraries(self, case: str, hidden: int, dropout: float = 0.0) -> None:
        """On a GPU the libraries that are installed and know the case; one that cannot be imported is left out."""
        if not self.bench.card.is_gpu:
            return
        x = self.eager.x
        for name, make in libraries.installed(case, hidden, dropout, self.bench.tune).items():
            self.add(name, lambda make=make: self.eager.like(make().to(x.device, x.dtype)))  # type: ignore[misc]

    def remarks(self) -> dict[str, Any]:
        """For an entry."""
        found = {"left_out": self.left_out, "tuning": self.tuning}
        return {key: value for key, value in found.items() if value}
