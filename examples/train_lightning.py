"""Train the small GPT by Lightning, on several processes: DDP, or with --tp the model strategy of its own.

torchrun --nproc-per-node 2 examples/train_lightning.py
torchrun --nproc-per-node 2 examples/train_lightning.py --tp 2
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_steps as steps
import pytorch_lightning as lightning
import torch
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
from torch.utils.data import DataLoader

import te_fuser


class Training(lightning.LightningModule):
    """The model, its steps and its optimizer."""

    def __init__(self, text: Path, tp: int) -> None:
        super().__init__()
        self.text, self.tp = text, tp
        self.model = steps.model()
        self.losses: list[torch.Tensor] = []

    def configure_model(self) -> None:
        """Cut the model where ranks share it; Lightning has made the mesh."""
        if self.tp > 1:
            assert self.device_mesh is not None
            te_fuser.parallelize(self.model, self.device_mesh["tensor_parallel"])

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        """The loss of a batch."""
        loss = steps.loss_of(self.model(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Optimizer of all these examples."""
        return steps.make_optimizer(self.parameters())

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
        """Batches of this rank; ranks that share the model have the same."""
        replicas = self.trainer.world_size // self.tp
        own = steps.batches(self.text, self.global_rank // self.tp, replicas)
        return DataLoader([(w.inputs, w.targets) for w in own], batch_size=None)  # type: ignore[arg-type]


def main(argv: Sequence[str] | None = None) -> int:
    """Take the steps; the exit status."""
    chosen = steps.parse(__doc__, argv)
    world = int(os.environ["WORLD_SIZE"])
    strategy: Any = DDPStrategy()
    if chosen.tp > 1:
        strategy = ModelParallelStrategy(world // chosen.tp, chosen.tp, process_group_backend=None)
    training = Training(chosen.text, chosen.tp)
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu", devices=world, strategy=strategy, max_epochs=1,
        precision="bf16-mixed" if chosen.bf16 else "32-true", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(training)
    steps.report(steps.mean_over_ranks(training.losses), chosen.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
