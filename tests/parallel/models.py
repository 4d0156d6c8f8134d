"""The models that tests on several ranks wrap, each a list of layers, with the batch that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_fuser
from te_fuser import ops
from tests.parallel.ranks import WORLD
from tests.twins import assert_same_gradients, randomize, sequential, tensor

FEATURES, POSITIONS, BATCH = 8, 3, 4
Model = Callable[[], nn.Module]


def plain_list() -> te_fuser.Sequential:
    """Ops, one by one."""
    return sequential(
        ops.LayerNorm(FEATURES), ops.Linear(FEATURES, 16), ops.GELU(), ops.Linear(16, FEATURES), ops.RMSNorm(FEATURES)
    )


def residual_layers() -> te_fuser.Sequential:
    """Lists in a list."""
    return sequential(*(te_fuser.Residual(*plain_list()) for _ in range(3)))


def mlps() -> te_fuser.Sequential:
    made = (te_fuser.LayerNormMLP(FEATURES, 16, activation="swiglu", params_dtype=torch.float64) for _ in range(2))
    return sequential(*made)


class Layers(nn.Module):
    """Layers that a loop of the user's calls."""

    def __init__(self, layers: Iterable[nn.Module], call: Callable[..., torch.Tensor] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.call is None else self.call(layer, x)
        return x

    def __iter__(self) -> Any:
        return iter(self.layers)


def transformer_layers(call: Callable[..., torch.Tensor] | None = None, **keywords: Any) -> Layers:
    """Queries, keys and values have weights of their own, which products read joined."""
    given = {"num_gqa_groups": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
    given |= {"params_dtype": torch.float64, "kernels": "reference"}
    layers = [te_fuser.TransformerLayer(FEATURES, 16, 2, **given, **keywords) for _ in range(2)]
    return randomize(Layers(layers, call))


BY_TORCH = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
MODELS: dict[str, Model] = {
    "list": plain_list,
    "residual": residual_layers,
    "looped": lambda: Layers(residual_layers()),  # each run by itself
    "LayerNormMLP": mlps,
    "TransformerLayer": transformer_layers,
    "checkpoint": lambda: transformer_layers(te_fuser.checkpoint),
    "checkpoint of torch": lambda: transformer_layers(BY_TORCH),
}


def spread(model: Any, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    """`fully_shard`: each layer of a list by itself, and what is left."""
    mesh = mesh or init_device_mesh("cpu", (WORLD,))
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)  # type: ignore[no-any-return]


def adam(model: nn.Module) -> torch.optim.AdamW:
    # Such an eps, as the gradient of a bias of keys is rounding alone: attention does not see it.
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3, weight_decay=0.1)


def saved(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def loaded(model: nn.Module, folder: Path, alone: bool = False) -> torch.optim.Optimizer:
    """The optimizer of a model of other values, when both have loaded a checkpoint."""
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = adam(model)
    state = saved(model, optimizer)
    dcp.load(state, checkpoint_id=folder, no_dist=alone)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return optimizer


def whole_batch(step: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[positions, batch, features], the same on all ranks."""
    return tensor(POSITIONS, BATCH, FEATURES, dtype=dtype, grad=False, seed=step)


def own(x: torch.Tensor, rank: int | None = None) -> torch.Tensor:
    """The samples of this rank."""
    return x.chunk(WORLD, 1)[dist.get_rank() if rank is None else rank]


def backward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradients of the mean over a batch, into the parameters; gives the loss."""
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """By the names that the model has without a wrapper; what is cut, as a whole."""
    found = {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}
    return {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in found.items()}


def assert_step_as_one_process(model: nn.Module, twin: nn.Module, step: int = 0) -> None:
    """The twin goes through a whole batch, the model through this rank's part: gradients are the same."""
    x = whole_batch(step)
    for m, part in ((model, own(x)), (twin, x)):
        m.zero_grad()
        backward(m, part)
    assert_as_one_process(model, twin)


def assert_as_one_process(model: nn.Module, twin: nn.Module, tolerance: float = 1e-11) -> None:
    """Gradients are those that one process has of the whole batch."""
    assert_same_gradients(gradients(model), gradients(twin), tolerance)
