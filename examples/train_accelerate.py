"""Train the small GPT by accelerate, on several processes.

torchrun --nproc-per-node 2 examples/train_accelerate.py
"""

from __future__ import annotations

from collections.abc import Sequence

import engine_steps as steps
import torch
from accelerate import Accelerator


def main(argv: Sequence[str] | None = None) -> int:
    """Take the steps; the exit status."""
    chosen = steps.parse(__doc__, argv)
    accelerator = Accelerator(mixed_precision="bf16" if chosen.bf16 else "no", cpu=not torch.cuda.is_available())
    model = steps.model()
    model, optimizer = accelerator.prepare(model, steps.make_optimizer(model.parameters()))
    losses = []
    for windows in steps.batches(chosen.text, accelerator.process_index, accelerator.num_processes):
        inputs, targets = (t.to(accelerator.device) for t in (windows.inputs, windows.targets))
        loss = steps.loss_of(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.detach())
    steps.report(steps.mean_over_ranks(losses), chosen.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
