"""The override for torchtitan: its Llama 3 with blocks of ours gives what it gives, with its names, shards and AC."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from te_fuser.ops import FusableOperation
from tests.parallel.ranks import WORLD, on_ranks

pytest.importorskip("triton", reason="torchtitan's models import it")
pytest.importorskip("torchtitan")
OVERRIDE = "te_fuser.integrations.torchtitan.llama3_block"
IDS = torch.randint(2048, (2, 13), generator=torch.Generator().manual_seed(0))


def built(overridden: bool, dtype: torch.dtype = torch.float64) -> Any:
    """Its small model with two blocks, whose attention a CPU can run."""
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    config = copy.deepcopy(model_registry("debugmodel").model)
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if overridden:
        lines = apply_overrides(OverrideConfig(imports=[OVERRIDE]), config)
        assert len(lines) == 2 and all("FusedTransformerBlock" in line for line in lines)
    torch.manual_seed(0)
    model = config.build()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * p.shape[-1] ** -0.5)
            p.data = p.data.to(dtype)  # not model.to(dtype), which would take the imaginary part from the angles
    return model


def parts_run_by_themselves(model: Any) -> list[str]:
    """The members of all lists, of both blocks, that are no ops."""
    lists = [listed for block in model.layers.values() for _, listed in vars(block)["_te_fuser_lists"].values()]
    assert len(lists) == 4
    return [repr(member) for listed in lists for member in listed if not isinstance(member, FusableOperation)]


def results(model: Any, ids: torch.Tensor = IDS) -> dict[str, torch.Tensor]:
    logits = model(ids)
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    (loss / IDS.numel()).backward()  # of all ranks' tokens, as torchtitan has it: gradients are summed over ranks
    grads = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return {"logits": logits.detach(), **grads}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        torch.testing.assert_close(found[name], want, rtol=0, atol=tolerance * want.abs().max().item(), msg=name)


def test_values_and_gradients() -> None:
    ours = built(True)
    close(results(ours), results(built(False)), 1e-12)
    assert parts_run_by_themselves(ours) == []


def test_names_and_checkpoints_are_the_stock_models() -> None:
    ours, stock = built(True), built(False)
    assert [*ours.state_dict()] == [*stock.state_dict()]
    with torch.no_grad():
        for p in stock.parameters():
            p.mul_(0.5)
    ours.load_state_dict(stock.state_dict())
    close(results(ours), results(stock), 1e-12)


def test_hooks_of_a_part_are_called() -> None:
    ours, seen = built(True), list[Any]()
    results(ours)
    block = ours.layers["1"]
    for name in ("attention_norm", "ffn_norm", "feed_forward"):
        block.get_submodule(name).register_forward_hook(lambda module, x, y: seen.append(type(module).__name__))
    close(results(ours), results(built(False)), 1e-12)
    assert seen == ["RMSNorm", "RMSNorm", "FeedForward"] and len(parts_run_by_themselves(ours)) == 3


@pytest.mark.parametrize("checkpointing", ["none", "FullAC", "SelectiveAC"])
@on_ranks
def test_shards_and_activation_checkpoints(checkpointing: str) -> None:
    """Its fully_shard on two ranks, of one half of the batch each, and its ways to compute a block again."""
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

    want = results(built(False))
    model = built(True)
    if checkpointing != "none":
        getattr(activation_checkpoint, checkpointing).Config().build(dump_folder="").apply(model)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(model, mesh, torch.float64, torch.float64, pp_enabled=False)
    found = results(model, IDS.chunk(WORLD)[dist.get_rank()])
    want["logits"] = want["logits"].chunk(WORLD)[dist.get_rank()]
    close({name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in found.items()}, want, 1e-12)
