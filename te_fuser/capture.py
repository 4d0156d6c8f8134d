"""CUDA graphs of whole models: forward and backward are captured once and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_fuser.ops.main_grad import held_main_grad, restored

Samples = torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]


class GraphedModel:
    """A model whose forward and backward are CUDA graphs; call it as the model, with tensors like the sample inputs.

    Parameters, state_dict and train() are those of `model`: an optimizer's step in place is seen by the next replay.
    """

    def __init__(self, model: torch.nn.Module, replay: Any, samples: Mapping[str, torch.Tensor]) -> None:
        self.model = model
        self._replay = replay
        self._names = tuple(samples)[1:]
        self._samples = {name: _form(t) for name, t in samples.items()}
        self._training = model.training
        self._parameters = [(name, p, p.data_ptr()) for name, p in model.named_parameters()]
        self._main_grads = [(name, p, address) for name, p, _ in self._parameters if (address := _main_grad_at(p))]

    def __call__(self, x: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Replay for x; the result's memory is written again by the next call.

        Raises:
            ValueError: when a tensor is not like its sample, the mode is another one, or a parameter was replaced.
        """
        self._check({"x": x, **inputs})
        return self._replay(x, *[inputs[name] for name in self._names])

    def _check(self, given: Mapping[str, torch.Tensor]) -> None:
        if given.keys() != self._samples.keys():
            raise ValueError(f"this graph was captured for {', '.join(self._samples)}, got {', '.join(given)}")
        for name, t in given.items():
            if _form(t) != self._samples[name]:
                raise ValueError(
                    f"{name} is {_text(_form(t))}, and the graph was captured for {_text(self._samples[name])}: "
                    "call cuda_graph once for each shape, or call the model itself"
                )
        if self.model.training != self._training:
            mode = "train" if self._training else "eval"
            raise ValueError(f"this graph was captured in {mode} mode: call model.{mode}(), or cuda_graph again")
        for name, p, address in self._parameters:
            if p.data_ptr() != address:
                raise ValueError(f"parameter {name} has other memory than at capture (.to() or .data): capture again")
        for name, p, address in self._main_grads:
            if _main_grad_at(p) != address:
                raise ValueError(f"the main_grad of parameter {name} has other memory than at capture: capture again")


def cuda_graph(model: torch.nn.Module, sample_inputs: Samples, *, warmup: int = 3) -> GraphedModel:
    """Capture a model's forward and backward as CUDA graphs: then a call costs the host two launches.

    Random draws are new at each replay. Inputs are copied to where the graph reads them, and gradients flow to
    parameters and to inputs whose sample requires one.

    Args:
        model: a te_fuser.Sequential, or any module that a graph can hold, on a CUDA device.
        sample_inputs: x, or (x, {name: tensor}) with the named inputs; shapes, dtypes and requires_grad as in the
            calls to come.
        warmup: calls before the capture; they make the plans, compile and choose, which a capture cannot.

    Returns:
        A callable that takes the same tensors as the model.

    Raises:
        RuntimeError: without a CUDA device.
        ValueError: for a model or sample inputs that are not on a CUDA device.
    """
    x, named = sample_inputs if isinstance(sample_inputs, tuple) else (sample_inputs, {})
    samples = {"x": x, **named}
    _check_devices(model, samples)
    with restored(model.parameters()):  # what the warm-up adds to main_grad is no gradient
        replay = torch.cuda.make_graphed_callables(
            _Positional(model, tuple(named)),
            tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in samples.values()),
            num_warmup_iters=warmup,
            allow_unused_input=True,
        )
    return GraphedModel(model, replay, samples)


class _Positional(torch.nn.Module):
    """The model with its named inputs by position, as PyTorch's capture passes them."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self._names = model, names
        self.training = model.training

    def forward(self, x: torch.Tensor, *inputs: torch.Tensor) -> Any:
        return self.model(x, **dict(zip(self._names, inputs, strict=True)))


def _main_grad_at(p: torch.Tensor) -> int:
    """Where a parameter's main_grad lies; 0 where it has none."""
    held = held_main_grad(p)
    return 0 if held is None else held.data_ptr()


def _check_devices(model: torch.nn.Module, samples: Mapping[str, torch.Tensor]) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("cuda_graph needs a CUDA device, and PyTorch sees none here")
    tensors = {**samples, **{f"parameter {name}": p for name, p in model.named_parameters()}}
    for name, t in tensors.items():
        if t.device.type != "cuda":
            raise ValueError(f"cuda_graph captures what runs on a CUDA device; {name} is on {t.device}")


def _form(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.requires_grad


def _text(form: tuple[Any, ...]) -> str:
    shape, dtype, device, needs = form
    return f"{dtype} {list(shape)} on {device}" + (" with requires_grad" if needs else "")
