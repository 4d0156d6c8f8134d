"""Train the small GPT as torchtitan does: made on meta, parallelized, fully sharded, then loaded; saved by DCP.

torchrun --nproc-per-node 4 examples/train_titan.py --tp 2
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_steps as steps
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import build_gpt
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import te_fuser


def made(mesh: DeviceMesh, bf16: bool) -> te_fuser.Sequential:
    """The model without numbers: of each parameter the part that this process has."""
    with torch.device("meta"):
        model = build_gpt(steps.SHAPE)
    te_fuser.parallelize(model, mesh["tp"])
    parallelize_module(model, mesh["tp"], {"embedding": RowwiseParallel(input_layouts=Replicate())})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    options: dict[str, Any] = {"mesh": mesh["dp"]}
    options |= {"mp_policy": policy} if policy else {}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def train(model: Any, optimizer: Any, windows: Sequence[Any], device: str) -> list[torch.Tensor]:
    """The losses of these steps."""
    losses = []
    for part in windows:
        loss = steps.loss_of(model(part.inputs.to(device)), part.targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def main(argv: Sequence[str] | None = None) -> int:
    """Begin from a checkpoint of the whole; save after half of the steps, and go on from there; the exit status."""
    chosen = steps.parse(__doc__, argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size() // chosen.tp, chosen.tp), mesh_dim_names=("dp", "tp"))
    windows = steps.batches(chosen.text, mesh["dp"].get_local_rank(), mesh["dp"].size())
    half, losses, given = steps.STEPS // 2, list[torch.Tensor](), [tempfile.mkdtemp()]
    dist.broadcast_object_list(given)
    folder = Path(str(given[0]))
    if dist.get_rank() == 0:
        dcp.save({"model": steps.model().state_dict()}, checkpoint_id=folder / "0", no_dist=True)
    dist.barrier()
    for part in (windows[:half], windows[half:]):
        model = made(mesh, chosen.bf16).to_empty(device=device)
        optimizer = steps.make_optimizer(model.parameters())
        load(model, optimizer if losses else None, folder / f"{len(losses)}")
        losses += train(model, optimizer, part, device)
        dcp.save(state(model, optimizer), checkpoint_id=folder / f"{len(losses)}")
    steps.report(steps.mean_over_ranks(losses), chosen.out)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return 0


def state(model: Any, optimizer: Any = None) -> dict[str, Any]:
    """As the whole model's, whatever ranks there are."""
    found = zip(("model", "optimizer"), get_state_dict(model, [] if optimizer is None else optimizer), strict=True)
    return dict(found) if optimizer is not None else {"model": next(found)[1]}


def load(model: Any, optimizer: Any, folder: Path) -> None:
    """Into a model and an optimizer that are new; without one into a model."""
    found = state(model, optimizer)
    dcp.load(found, checkpoint_id=folder)
    optimizers = [] if optimizer is None else optimizer
    set_state_dict(model, optimizers, model_state_dict=found["model"], optim_state_dict=found.get("optimizer", {}))


if __name__ == "__main__":
    raise SystemExit(main())
