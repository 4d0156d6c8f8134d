"""One model in training: its optimizer, its schedule, its random numbers, its losses and its speed."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from text import Windows, random_windows
from torch.nn import functional

import te_fuser
from te_fuser.recipe import Recipe

WARM_UP = 0.05  # of the steps
LOWEST_RATE = 0.05  # of the highest
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
LARGEST_GRADIENT = 1.0  # norm of all gradients together


@dataclass(frozen=True)
class Schedule:
    """The learning rate at each step: a straight rise, then half a cosine down."""

    highest: float
    steps: int

    def __call__(self, step: int) -> float:
        rising = max(1, round(WARM_UP * self.steps))
        if step < rising:
            return self.highest * (step + 1) / rising
        share = (step - rising) / max(1, self.steps - rising)
        return self.highest * (LOWEST_RATE + (1 - LOWEST_RATE) * 0.5 * (1 + math.cos(math.pi * share)))


@dataclass
class Speed:
    """Seconds of this process; the first step, which plans and compiles, is kept apart."""

    tokens: int  # of a step
    first_step: float | None = None
    steps: int = 0
    seconds: float = 0.0

    @property
    def seconds_per_step(self) -> float:
        """Of all steps but the first; 0 while there is no other."""
        return self.seconds / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of all steps but the first; 0 while there is no other."""
        return self.tokens / self.seconds_per_step if self.steps else 0.0

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s" if self.steps else ""


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW that lets only matrices decay."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=BETAS, fused=True)


class Trainer:
    """Trains one model; two trainers with one seed see the same batches and do not disturb each other's dropout.

    Args:
        data: the training text, on the model's device.
        dtype: float32, or bfloat16 for autocast over float32 parameters.
        recipe: of FP8, in whose region the model runs; by default in none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        data: torch.Tensor,
        schedule: Schedule,
        *,
        batch: int,
        context: int,
        seed: int,
        dtype: torch.dtype,
        recipe: Recipe | None = None,
    ) -> None:
        self.model, self.data, self.schedule = model, data, schedule
        self.batch, self.context, self.dtype, self.recipe = batch, context, dtype, recipe
        self.optimizer = make_optimizer(model)
        self.step = 0
        self.losses = torch.zeros(schedule.steps, device=data.device)  # of each step
        self.speed = Speed(batch * context)
        self.batches = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        self._dropout = self._global_random_states()

    def train(self, steps: int, stopped: Callable[[], bool] = lambda: False) -> None:
        """Take this many steps, or fewer when `stopped()`."""
        self.model.train()
        self._set_global_random_states(self._dropout)
        start, before = time.perf_counter(), self.step
        for _ in range(steps):
            if stopped():
                break
            self._take_step()
            if self.speed.first_step is None:
                self._finish_work()
                self.speed.first_step = time.perf_counter() - start
                start, before = time.perf_counter(), self.step
        self._finish_work()
        self.speed.steps += self.step - before
        self.speed.seconds += time.perf_counter() - start
        self._dropout = self._global_random_states()

    def _take_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(self.step)
        windows = random_windows(self.data, self.batch, self.context, self.batches)
        logits = self.logits(windows.inputs).flatten(0, 1)
        loss = functional.cross_entropy(logits.float(), windows.targets.flatten())  # bfloat16 would round the loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.losses[self.step] = loss.detach()
        self.step += 1

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The model's output, computed in the run's dtype."""
        with self.autocast():
            return self.model(tokens)

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """The context in which the model runs."""
        half = torch.autocast(self.data.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)
        with half, te_fuser.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            yield

    @torch.no_grad()
    def validate(self, windows: Windows) -> float:
        """The mean loss over all windows, in nats per byte."""
        self.model.eval()
        total = 0.0
        for part in windows.batches(self.batch):
            logits = self.logits(part.inputs).flatten(0, 1)
            total += functional.cross_entropy(logits.float(), part.targets.flatten(), reduction="sum").item()
        return total / windows.targets.numel()

    def recent_loss(self, steps: int) -> float:
        """The mean training loss of the last steps."""
        return self.losses[max(0, self.step - steps) : self.step].mean().item()

    # -------------------------------------------------------------------------- random numbers

    def random_states(self) -> dict[str, torch.Tensor]:
        """States of the random generators: of batches, and of dropout (PyTorch's global ones)."""
        return {"batches": self.batches.get_state(), **self._dropout}

    def set_random_states(self, states: dict[str, torch.Tensor]) -> None:
        """Go on where `random_states` was."""
        self.batches.set_state(states["batches"])
        self._dropout = {**self._dropout, **{name: states[name] for name in ("torch", "cuda") if name in states}}

    def _global_random_states(self) -> dict[str, torch.Tensor]:
        states = {"torch": torch.get_rng_state()}
        if self.data.is_cuda:
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def _set_global_random_states(self, states: dict[str, torch.Tensor]) -> None:
        torch.set_rng_state(states["torch"])
        if self.data.is_cuda:
            torch.cuda.set_rng_state(states["cuda"])

    def _finish_work(self) -> None:
        if self.data.is_cuda:
            torch.cuda.synchronize()
