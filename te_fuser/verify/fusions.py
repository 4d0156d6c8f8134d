"""Verifying a fusion: on lists that its pattern matches, with this fusion and no other."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from te_fuser.compare import Row
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Cost, Fusion, only
from te_fuser.ops import Output, SiLU
from te_fuser.ops.base import FusableOperation
from te_fuser.sequential import Sequential
from te_fuser.verify.examples import Case, Example, example_cases, examples
from te_fuser.verify.models import Subject, example_call, first_features, with_owners
from te_fuser.verify.report import VerifyReport

_FEATURES = (48, 17)


class FusionCheck:
    """The verification of one fusion, on lists made from its pattern, or on these."""

    def __init__(
        self,
        fusion: Fusion,
        lists: Sequence[Sequence[FusableOperation]] | None,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        kernels: str,
    ) -> None:
        # At no cost, it is taken wherever it may be.
        self.fusion = dataclasses.replace(fusion, cost=lambda m: Cost(seconds=0.0))
        self.lists, self.dtypes, self.device, self.kernels = lists, dtypes, device, kernels
        self.rows: list[Row] = []
        self.skipped: list[tuple[str, str]] = []

    def report(self) -> VerifyReport:
        """Run every case of every list; ValueError when no list can be made."""
        with only(self.fusion):
            for features, example, whole in self._examples():
                self._check_list(features, example, whole)
        return VerifyReport(f"fusion {self.fusion.name!r}", tuple(self.rows), tuple(self.skipped))

    def _examples(self) -> Iterator[tuple[int, Example, bool]]:
        """(features, list, whether all cases are run on it)."""
        if self.lists is not None:
            for ops in self.lists:
                label = ", ".join(type(op).__name__ for op in ops)
                yield first_features(Sequential(*ops), _FEATURES[0]), Example(label, tuple(ops)), True
            return
        failed: list[ValueError] = []
        for features in _FEATURES:
            try:
                found = list(examples(self.fusion, features, torch.Generator().manual_seed(features)))
            except ValueError as error:  # an odd size for a gated unit
                failed.append(error)
                self.skipped.append((f"{features} features", str(error)))
                continue
            for example in found:
                yield features, example, not example.changed and len(failed) == _FEATURES.index(features)
        if len(failed) == len(_FEATURES):
            raise failed[0]

    def _check_list(self, features: int, example: Example, whole: bool) -> None:
        options: dict[str, Any] = {"memory": "fast", "kernels": self.kernels}
        self._check_model(example.label, Sequential(*example.ops, **options), features, whole)
        if whole:
            # Something else reads what enters, and the gradient of what leaves is no leaf's.
            between = Sequential(SiLU(), Output("before"), Sequential(*example.ops), SiLU(), **options)
            self._check_model(f"SiLU, {example.label}, SiLU", between, features, False)

    def _check_model(self, label: str, model: Sequential, features: int, whole: bool) -> None:
        parameters = [name for name, _ in with_owners(model).named_parameters()]
        draws = any(op.draws() for op in model.operations())
        for dtype in self.dtypes:
            subject = Subject(model, dtype, self.device)
            cases = [*example_cases((dtype,), parameters, draws, features)]
            if not whole:  # an odd shape, the gradient that y.sum() brings, and no gradients
                cases = [c for c in cases if c.leading == (7,) or c.upstream == "ones" or c.frozen == "all"]
            for case in cases:
                named = dataclasses.replace(case, name=f"{label}: {case.name.replace('features', str(features))}")
                self._check_case(named, subject, features)

    def _check_case(self, case: Case, subject: Subject, features: int) -> None:
        assert case.leading is not None and case.dtype is not None
        rng = torch.Generator().manual_seed(3)
        try:
            call = example_call(subject.fused, (*case.leading, features), case.dtype, self.device, rng)
            why = self._why_not(subject.plan(case, call))
        except (ValueError, TypeError) as error:
            why = str(error)
        if why is None:
            self.rows += subject.check(case, call)
        else:
            self.skipped.append((case.name, why))

    def _why_not(self, plan: Plan) -> str | None:
        """Reason for which this plan is without the fusion; None where it has it."""
        name = self.fusion.name
        if name in {s.name for s in (plan.forward if self.fusion.has_forward else plan.backward)}:
            return None
        if not self.fusion.has_forward and not plan.backward:
            return "no gradient is needed here"
        reasons = dict.fromkeys(r.reason for r in plan.refusals if r.name == name)
        return "; ".join(reasons) or "its pattern matches nowhere in this list"

    def never_taken(self) -> str | None:
        """Message for when no case ran, with the reasons; None where one did."""
        if self.rows:
            return None
        reasons = dict.fromkeys(why for _, why in self.skipped)
        listed = "".join(f"\n  {why}" for why in itertools.islice(reasons, 8))
        return f"fusion {self.fusion.name!r} was never taken, so nothing was verified, because:{listed}"
