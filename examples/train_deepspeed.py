"""Train the small GPT by DeepSpeed, whose ZeRO-1 spreads the optimizer's state over the processes.

torchrun --nproc-per-node 2 examples/train_deepspeed.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import engine_steps as steps
import torch
import torch.distributed as dist


def main(argv: Sequence[str] | None = None) -> int:
    """Take the steps; the exit status."""
    chosen = steps.parse(__doc__, argv)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    ranks = dist.get_world_size()
    config: dict[str, Any] = {
        "train_batch_size": steps.BATCH,
        "train_micro_batch_size_per_gpu": steps.BATCH // ranks,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # by default it clips
        "bf16": {"enabled": chosen.bf16},
    }
    model = steps.model()
    engine, *_ = deepspeed.initialize(model=model, optimizer=steps.make_optimizer(model.parameters()), config=config)
    losses = []
    for windows in steps.batches(chosen.text, dist.get_rank(), ranks):
        inputs, targets = (t.to(engine.device) for t in (windows.inputs, windows.targets))
        loss = steps.loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    steps.report(steps.mean_over_ranks(losses), chosen.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
