"""Steps of transformers' Trainer on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.convert.models import WORDS, transformers

pytest.importorskip("accelerate")
STEPS = 6


class Rows(torch.utils.data.Dataset[Any]):
    """Two sequences that count up, with padding behind them."""

    def __init__(self, rows: int = 24) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        ids = 1 + (7 * (k % 2) + torch.arange(11)) % (WORDS - 1)
        mask = (torch.arange(11) < 8 + k % 4).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def trainer(model: Any, folder: Path, **arguments: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    chosen = transformers.TrainingArguments(**{**settings, **arguments})
    return transformers.Trainer(model=model, args=chosen, train_dataset=Rows(), eval_dataset=Rows(8))


def logged(trained: Any, name: str) -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]
