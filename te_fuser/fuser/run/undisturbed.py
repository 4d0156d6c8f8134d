"""Runs that only measure, and leave a model and the generators of random numbers as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from te_fuser.fuser.run import delayed
from te_fuser.params.scales import asides


@contextmanager
def undisturbed(model: torch.nn.Module, x: Any) -> Iterator[None]:
    """Runs in here see copies of the model's buffers, and random generators and what is kept on modules are set back.

    Nothing is copied back, so that buffers keep their versions, which graphs of earlier calls look at.
    """
    modules = list(model.modules())
    devices = [t.device for t in (x, *model.parameters(), *model.buffers()) if isinstance(t, torch.Tensor)]
    generators = {g for m in modules for g in vars(m).values() if isinstance(g, torch.Generator)}
    states = [(g, g.get_state()) for g in generators]
    copies = {id(b): b.detach().clone().requires_grad_(b.requires_grad) for b in model.buffers()}
    before = [(m, dict(m._buffers)) for m in modules]
    gpus = sorted({d.index for d in devices if d.type == "cuda"})
    with delayed.at_once(), asides_undisturbed(), pythons_draws_undone(), torch.random.fork_rng(gpus):
        try:
            for m, held in before:
                _hold(m, {name: b if b is None else copies[id(b)] for name, b in held.items()})
            yield
        finally:
            for m, held in before:
                _hold(m, held)
            for generator, state in states:
                generator.set_state(state)


def _hold(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> None:
    if isinstance(module, torch.jit.ScriptModule):  # its dict of buffers only shows them
        for name, buffer in buffers.items():
            setattr(module, name, buffer)
    else:
        for name in [name for name in module._buffers if name not in buffers]:
            del module._buffers[name]
        module._buffers.update(buffers)


@contextmanager
def asides_undisturbed() -> Iterator[None]:
    """Afterwards all that is kept on modules beside their parameters (`Aside`) is as it was before."""
    then = [(aside, aside.now()) for aside in asides()]
    try:
        yield
    finally:
        before = {id(aside): noted for aside, noted in then}
        for aside in asides():
            aside.put_back(before.get(id(aside)))


@contextmanager
def pythons_draws_undone() -> Iterator[None]:
    """After this Python's random generator is what it was."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
