"""Measuring and verifying on ranks together: the first one's clock decides, and results stay."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch.distributed as dist

import te_fuser
from te_fuser.fuser.tune import tune as tuning
from tests.gpu.ranks.models import assert_near, backward, batch, gradients, mesh, mlps, own
from tests.parallel.ranks import on_ranks


def same_on_all(value: object) -> None:
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert found == [value] * dist.get_world_size()


@on_ranks
def test_tune_verify_and_explain(tmp_path: Path) -> None:
    """By the first rank's clock all that is tried is faster, by the others' slower."""

    def contest(first: object, second: object, effort: tuning.Effort) -> float:
        for call in (first, second):
            call()  # type: ignore[operator]
        return 0.8 + dist.get_rank()

    model = te_fuser.parallelize(mlps(1), mesh(), sequence_parallel=True)
    x, dy = (own(batch(seed)).contiguous() for seed in (1, 2))
    want = [*backward(model, x, dy), *(g.clone() for _, g in gradients(model))]
    with (
        mock.patch.object(tuning, "_contest_on", lambda *given: contest),
        mock.patch.object(te_fuser.config, "cache_dir", tmp_path),
    ):
        report = model.tune(x.clone().requires_grad_())
        same_on_all(str(report))
        plan = model.plan(x.clone().requires_grad_())
        same_on_all([s.name for s in plan.steps])
        model.zero_grad()
        for g, w in zip([*backward(model, x, dy), *(g for _, g in gradients(model))], want, strict=True):
            assert_near(g, w)
        assert te_fuser.verify(model, x).passed
        assert "gather" in str(model.explain(x, measure=True, details=True))
