"""Models of transformers that it cuts for ranks by itself, converted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import te_fuser
from te_fuser.distributed.dtensor import is_dtensor
from tests.convert.models import assert_alike, model_of, results, tokens
from tests.parallel.ranks import WORLD, on_ranks

IDS = tokens(3, 7)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@on_ranks
def test_tensor_parallelism_of_transformers(family: str, tmp_path: Path) -> None:
    """Attention, of which a rank has some heads, runs by its module: values, gradients, tokens are the original's."""
    whole: Any = model_of(family, torch.float32)
    whole.save_pretrained(tmp_path, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))["tp"]
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
