"""Verification: whatever is fused against the operations it stands for, in float64, values and all gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from te_fuser.compare import Row
from te_fuser.distributed.consistency import shared_errors
from te_fuser.distributed.group import Group as RankGroup
from te_fuser.dtypes import text_of
from te_fuser.flatten import runs_itself
from te_fuser.fuser.run.delayed import at_once
from te_fuser.fuser.run.plan_cache import groups_of
from te_fuser.fusions import Fusion, get
from te_fuser.ops.base import FusableOperation, walk
from te_fuser.ops.checks import no_tensor
from te_fuser.sequential import Sequential
from te_fuser.verify.examples import Case, example, example_cases, variants
from te_fuser.verify.fusions import FusionCheck
from te_fuser.verify.models import (
    Subject,
    VerifiedCall,
    example_call,
    first_features,
    gradient_names,
    listed_ops,
    with_owners,
)
from te_fuser.verify.report import VerificationError, VerifyReport, progress
from te_fuser.verify.steps import run_verified

_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@at_once()
def verify(
    subject: str | Fusion | FusableOperation | Sequential,
    x: torch.Tensor | None = None,
    *,
    ops: Sequence[Sequence[FusableOperation]] | None = None,
    outputs: Sequence[str] = (),
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | str | None = None,
    kernels: str = "auto",
    raise_on_failure: bool = True,
    **inputs: torch.Tensor,
) -> VerifyReport:
    """Compare what is fused with the operations it stands for: values and all gradients, against float64.

    A result may err at most twice what plain PyTorch errs in the same dtype, op by op, plus one ulp of its scale; in
    its largest error and in its root-mean-square error. Every case also checks that inputs and parameters are left
    as they are, and that a second backward and a second run repeat the first bit for bit (gradients through attention
    on a GPU under torch.use_deterministic_algorithms only: its libraries promise no more). Ranks that share ops of a
    model verify it together, each what it has: x, and of parameters its part. What fails on one of them fails on all.

    Args:
        subject: a fusion or its name, to be run on lists that its pattern matches; or a model or op.
        x: what to call the model with; by default examples of many shapes.
        ops: for a fusion, the lists to use instead of those made from its pattern.
        outputs: for a model and x, the named outputs to compare too.
        dtypes: by default float32, bfloat16 and float64 for examples, and that of x for a given x.
        device: where examples are; by default where the model is, and for a fusion a GPU if there is one.
        kernels: for a fusion or an op, how its lists run, as in Sequential.
        raise_on_failure: whether to raise when something differs.
        **inputs: for a model and x, the tensors that ops read by name.

    Returns:
        The report; it prints as one line, and its `table()` has all cases.

    Raises:
        VerificationError: when a result differs, naming case, tensor and error; or when a fusion is never taken.
        RankMismatchError: on all ranks that share ops of the model, where one of them raised or verifies something
            else.
    """
    if x is not None and not isinstance(x, torch.Tensor):
        raise no_tensor("verify(model, x)", x)
    listed = isinstance(dtypes, Sequence) and all(isinstance(dtype, torch.dtype) for dtype in dtypes)
    if dtypes is not None and not listed:
        raise TypeError(f"dtypes are a list of PyTorch's, verify(model, dtypes=[torch.float32]), got {dtypes!r}")
    if isinstance(subject, (str, Fusion)):
        return _verify_fusion(subject, ops, dtypes or _DTYPES, device, kernels, raise_on_failure)
    if x is None and (outputs or inputs):
        raise ValueError("outputs and named inputs are those of a call with x: give x, or none of them")
    model = _listed(subject, kernels)
    ranks = groups_of(listed_ops(model))
    with shared_errors(ranks), progress(type(subject).__name__, told=not ranks):
        rows, skipped = _model_rows(model, x, inputs, tuple(outputs), dtypes, device, ranks)
    report = VerifyReport(type(subject).__name__, tuple(rows), tuple(skipped))
    if not rows:
        reasons = "; ".join(dict.fromkeys(why for _, why in skipped))
        raise VerificationError(f"{report.title}: no example input fits, so nothing was verified: {reasons}; give x")
    return _finished(report, raise_on_failure)


def _listed(subject: FusableOperation | Sequential, kernels: str) -> Sequential:
    """The subject as a list that is called as one, whatever its forward takes."""
    if not isinstance(subject, (Sequential, FusableOperation)):
        kind = f"the class {subject.__name__}: make one" if isinstance(subject, type) else type(subject).__name__
        raise TypeError(f"verify takes a fusion or its name, a Sequential, a preset or an op, got {kind}")
    if not isinstance(subject, Sequential):
        return Sequential(subject, kernels=kernels)
    if type(subject).forward is Sequential.forward or runs_itself(subject):
        return subject
    return Sequential(subject, **subject.options())


def _verify_fusion(
    fusion: str | Fusion,
    ops: Sequence[Sequence[FusableOperation]] | None,
    dtypes: Sequence[torch.dtype],
    device: torch.device | str | None,
    kernels: str,
    raise_on_failure: bool,
) -> VerifyReport:
    if ops is not None and (not ops or any(isinstance(given, FusableOperation) for given in ops)):
        raise TypeError(f"ops are lists of ops, verify(fusion, ops=[[MatMul(8, 8), GELU()]]), got {ops!r}")
    entry = get(fusion) if isinstance(fusion, str) else fusion
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check = FusionCheck(entry, ops, dtypes, where, kernels)
    with progress(f"fusion {entry.name!r}"):
        report = check.report()
    never = check.never_taken()
    if never is not None:
        raise VerificationError(never)
    return _finished(report, raise_on_failure)


def _model_rows(
    model: Sequential,
    x: torch.Tensor | None,
    inputs: dict[str, torch.Tensor],
    outputs: tuple[str, ...],
    dtypes: Sequence[torch.dtype] | None,
    device: torch.device | str | None,
    ranks: Sequence[RankGroup],
) -> tuple[list[Row], list[tuple[str, str]]]:
    whole = with_owners(model)
    parameters = [name for name, p in whole.named_parameters() if p.requires_grad]
    draws = any(op.draws() for op in walk(model))
    rows: list[Row] = []
    if x is not None:
        call = VerifiedCall(x, inputs, outputs, gradient_names(model, inputs))
        for dtype in dtypes or (None,):
            label = text_of(dtype or x.dtype)
            subject = Subject(model, dtype, ranks=ranks)
            plain = Case(f"{label} {list(x.shape)}", dtype)
            for case in (plain, *variants(plain, parameters, draws)):
                rows += subject.check(case, call.to(dtype))
        return rows, []
    features = first_features(model, 48)
    where = torch.device(device or next(whole.parameters(), torch.empty(0)).device)
    skipped: list[tuple[str, str]] = []
    for dtype in dtypes or _DTYPES:
        subject = Subject(model, dtype, where, ranks)
        for case in example_cases((dtype,), parameters, draws, features):
            assert case.leading is not None
            try:
                rng = torch.Generator().manual_seed(3)
                example = example_call(subject.fused, (*case.leading, features), dtype, where, rng)
            except (ValueError, TypeError) as error:
                skipped.append((case.name, str(error)))
                continue
            rows += subject.check(case, example)
    return rows, skipped


def _finished(report: VerifyReport, raise_on_failure: bool) -> VerifyReport:
    if raise_on_failure and not report.passed:
        raise report.error()
    return report


__all__ = ["Row", "VerificationError", "VerifyReport", "example", "run_verified", "verify"]
