"""Goals on an H200, as numbers of an entry, and the judgement of whether they were met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Goal:
    """A bound on one number of a contender.

    Attributes:
        key: the number's name in the record.
        bound: the most that is good enough; the least, with `at_least`.
    """

    key: str
    bound: float
    contender: str = "te_fuser"
    at_least: bool = False

    def judge(self, contenders: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
        """Number found and its judgement; None where it was not measured."""
        found = contenders.get(self.contender, {}).get(self.key)
        if found is None:
            return None
        met = found >= self.bound if self.at_least else found <= self.bound
        bound = {"least" if self.at_least else "most": self.bound}
        return {"contender": self.contender, "what": self.key, **bound, "found": found, "met": met}


AHEAD = Goal("over_best_rival", 1.0)


def over_floor(most: float, contender: str = "te_fuser") -> Goal:
    """The time over the floor."""
    return Goal("over_floor", most, contender)


SEED_LAYER = (
    over_floor(1.05), AHEAD, Goal("kept_mib", 800.0), Goal("peak_over_eager", 1.0), Goal("kernels", 28.0),
    over_floor(1.03, "te_fuser fast"), Goal("kept_mib", 650.0, "te_fuser lean"),
)  # fmt: skip
# At any memory: rivals keep GELU's output, which "fast" does too and the default computes once more.
GELU_MLP = (over_floor(1.03, "te_fuser fast"), Goal("over_best_rival", 1.0, "te_fuser fast"), AHEAD)


def judged(goals: Sequence[Goal], entry: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each goal whose number an entry has."""
    found = (goal.judge(entry["contenders"]) for goal in goals)
    return [verdict for verdict in found if verdict is not None]


def sentence(verdict: Mapping[str, Any]) -> str:
    """A verdict in words."""
    sign, bound = ("<=", verdict["most"]) if "most" in verdict else (">=", verdict["least"])
    what = str(verdict["what"]).replace("_", " ")
    missed = "" if verdict["met"] else " (missed)"
    return f"{verdict['contender']} {what} {verdict['found']:.4g} {sign} {bound:g}{missed}"
