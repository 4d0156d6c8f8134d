"""Models of transformers that it cuts for ranks by itself, converted."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser.distributed.dtensor import is_dtensor
from tests.convert.models import assert_alike, model_of, results, tokens
from tests.convert.training import logged, trainer
from tests.parallel.ranks import WORLD, mesh_of, on_ranks

accelerate: Any = pytest.importorskip("accelerate")
IDS = tokens(3, 7)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@on_ranks
def test_tensor_parallelism_of_transformers(family: str, tmp_path: Path) -> None:
    """Attention, of which a rank has some heads, runs by its module: values, gradients, tokens are the original's."""
    whole: Any = model_of(family, torch.float32)
    whole.save_pretrained(tmp_path, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    mesh = mesh_of()["tp"]
    rank, ranks = str(dist.get_rank()), str(WORLD)
    with mock.patch.dict(os.environ, {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}):
        model: Any = type(whole).from_pretrained(tmp_path, tp_plan="auto", device_mesh=mesh, dtype=torch.float32).eval()
    call: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 4, "do_sample": False}
    words = model.generate(IDS, **call)
    conversion = te_fuser.convert(model)
    assert_alike(gathered(results(model, IDS)), results(whole, IDS), 1e-4)
    assert_alike({"logits": model(IDS).logits}, {"logits": whole(IDS).logits}, 1e-4)
    assert torch.equal(model.generate(IDS, **call), words)
    assert "is cut for the ranks of a mesh (tp_plan)" in conversion.left["model.layers.0.self_attn"]


def gathered(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.full_tensor() if is_dtensor(t) else t for name, t in found.items()}


@on_ranks
def test_trainer(tmp_path: Path) -> None:
    """DistributedDataParallel by transformers' Trainer: the losses of the original on as many ranks."""
    rank, ranks = str(dist.get_rank()), str(WORLD)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    original = model_of("llama", torch.float32)
    models = [original, copy.deepcopy(original)]
    te_fuser.convert(models[1])
    with mock.patch.dict(os.environ, environment | {"MASTER_PORT": "29500"}):
        trainers = [trainer(model, tmp_path, ddp_backend="gloo") for model in models]
        for one in trainers:
            one.train()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # as another test asks for another
    want, got = (logged(one, "loss") for one in trainers)
    assert dist.get_rank() != 0 or len(want) > 4
    assert type(trainers[1].model_wrapped).__name__ == "DistributedDataParallel"
    assert got == pytest.approx(want, abs=1e-5)
