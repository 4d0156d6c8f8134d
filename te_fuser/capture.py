"""CUDA graphs of whole models: forward and backward are captured once and replayed."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from te_fuser.contexts import being
from te_fuser.distributed.dtensor import own_part
from te_fuser.fake_tensors import Form, tensor_form
from te_fuser.fuser.plan.device import capturing
from te_fuser.fuser.show.measure import asides_undisturbed
from te_fuser.guards import still_hold
from te_fuser.kernels.peers import known_peers
from te_fuser.ops.base import FusableOperation
from te_fuser.params.main_grad import held_main_grad, restored
from te_fuser.params.scales import HISTORY, SCALE
from te_fuser.quantization.rerun import GraphedRegion
from te_fuser.sharding.rules import joint_ops

Samples = torch.Tensor | tuple[torch.Tensor] | tuple[torch.Tensor, Mapping[str, torch.Tensor]]


class GraphedModel:
    """A model whose forward and backward are CUDA graphs; call it as the model, with tensors like the sample inputs.

    Parameters, state_dict and train() are those of `model`: an optimizer's step in place is seen by the next replay.
    """

    def __init__(
        self, model: torch.nn.Module, replay: Any, samples: Mapping[str, torch.Tensor], within: GraphedRegion
    ) -> None:
        self.model = model
        self._replay = replay
        self._names = tuple(samples)[1:]
        self._samples = {name: tensor_form(t) for name, t in samples.items()}
        self._captured, self._within = _Captured(model), within

    def __call__(self, x: torch.Tensor, **inputs: torch.Tensor) -> Any:
        """Replay for x; the result's memory is written again by the next call.

        Raises:
            ValueError: when a tensor is not like its sample, or the model is not what it was: a module in another
                mode, an op's attribute set, or a parameter, buffer or module that was replaced or moved; in another
                region of FP8 than that of the capture.
            RankMismatchError: where the device waited for other ranks in vain.
        """
        self._check({"x": x, **inputs})
        self._captured.check()
        found = known_peers(self._captured.groups)
        for peers in found:
            peers.check()
        made = self._within.run(self._replay, x, *[inputs[name] for name in self._names])
        for peers in found:
            peers.mark()
        return made

    def _check(self, given: Mapping[str, torch.Tensor]) -> None:
        if given.keys() != self._samples.keys():
            raise ValueError(f"this graph was captured for {', '.join(self._samples)}, got {', '.join(given)}")
        for name, t in given.items():
            if tensor_form(t) != self._samples[name]:
                raise ValueError(
                    f"{name} is {_text(tensor_form(t))}, and the graph was captured for {_text(self._samples[name])}: "
                    "call cuda_graph once for each shape, or call the model itself"
                )


class _Captured:
    """State of its model that a graph depends on: the memory of its tensors, and its modules as they were.

    A replay looks at neither, so each call compares it with the model as it is. Tensors and modules are looked up
    where the model does, and kept: another one cannot come to lie at the address of one that was replaced.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._names, self._modules = map(list, zip(*model.named_modules(), strict=True))
        self._modes = [m.training for m in self._modules]
        ops = [(name, m) for name, m in model.named_modules() if isinstance(m, FusableOperation)]
        self._ops = [(name, m.facts()) for name, m in ops]
        names = {m: name for name, m in ops}
        first = {one.group: names[one.op] for one in reversed(joint_ops(names))}
        self.groups = tuple(first)
        self._groups = [(name, group, group.process_group()) for group, name in first.items()]
        self._children = [child for m in self._modules for child in m._modules.values()]
        self._tensors = [
            (f"{kind} {prefix}.{name}" if prefix else f"{kind} {name}", there, name, there[name])
            for prefix, m in zip(self._names, self._modules, strict=True)
            for kind, there in (("parameter", m._parameters), ("buffer", m._buffers))
            for name in there
            if not name.endswith((SCALE, HISTORY))  # which may be replaced: graphs read copies
        ]
        held = [(label, t) for label, _, _, t in self._tensors if t is not None and t.layout is torch.strided]
        self._memory = [(label, t, own_part(t).data_ptr(), t.requires_grad) for label, t in held]
        self._main_grads = [(label, t, address, _over(t)) for label, t in held if (address := _main_grad_at(t))]

    def check(self) -> None:
        """Compare with the model at the capture; ValueError says what is another."""
        if [child for m in self._modules for child in m._modules.values()] != self._children:
            raise ValueError("a module of this model was added, removed or replaced since the capture: capture again")
        if [m.training for m in self._modules] != self._modes:
            raise self._wrong_mode()
        for label, there, name, tensor in self._tensors:
            if there.get(name) is not tensor:
                raise ValueError(
                    f"{label} was replaced since the capture, and the graph reads the old one: capture again, or "
                    "change values in place (copy_, load_state_dict without assign=True)"
                )
        for label, tensor, address, needs_grad in self._memory:
            if own_part(tensor).data_ptr() != address:
                raise ValueError(f"{label} has other memory than at capture (.to() or .data): capture again")
            if tensor.requires_grad is not needs_grad:
                raise ValueError(
                    f"{label} has requires_grad={tensor.requires_grad}, and the graph was captured with {needs_grad}: "
                    f"call requires_grad_({needs_grad}), or capture again"
                )
        for name, facts in self._ops:
            if not still_hold(facts):
                changed = self._modules[self._names.index(name)]
                raise ValueError(
                    f"an attribute of {name or 'the model'} ({type(changed).__name__}) was set since the capture, and "
                    "the graph goes by the old one: capture again"
                )
        for name, group, ranks in self._groups:
            if group.process_group() is not ranks:
                raise ValueError(
                    f"the ranks of {name or 'the model'} (group {group.title!r}) were connected anew since capture, "
                    "and the graph goes by the old connection: capture again"
                )
        for label, tensor, address, over in self._main_grads:
            if _main_grad_at(tensor) != address:
                raise ValueError(f"the main_grad of {label} has other memory than at capture: capture again")
            if _over(tensor) is not over:
                raise ValueError(
                    f"{label} has overwrite_main_grad={not over}, and the graph was captured with {over}: capture "
                    "again, or leave it and fill main_grad with zeros before a step"
                )

    def _wrong_mode(self) -> ValueError:
        """Error for the first module in another mode, where the model is the first of all."""
        pairs = zip(self._names, self._modules, self._modes, strict=True)
        name, training = next((n, before) for n, m, before in pairs if m.training != before)
        mode = "train" if training else "eval"
        within, whose = (f"with {name} in", "its ") if name else ("in", "model.")
        return ValueError(f"this graph was captured {within} {mode} mode: call {whose}{mode}(), or cuda_graph again")


def cuda_graph(model: torch.nn.Module, sample_inputs: Samples, *, warmup: int = 3) -> GraphedModel:
    """Capture a model's forward and backward as CUDA graphs, so that a call takes two launches.

    Each replay draws new random numbers. Inputs are copied into the graph's memory, and gradients flow to parameters
    and to inputs whose sample requires one. A model captured in a region of FP8 has to be called in regions of the same
    recipe: replays use the current scales, and their amaxes count at the next update.

    Args:
        model: a te_fuser.Sequential, or any module that a graph can hold, on a CUDA device.
        sample_inputs: x or (x,), or (x, {name: tensor}) with named inputs; of the shapes, dtypes and requires_grad of
            later calls.
        warmup: calls before the capture, which make plans and compile kernels.

    Returns:
        A callable that takes the same tensors as the model.

    Raises:
        RuntimeError: without a CUDA device; while an output of an earlier call is held with its autograd graph.
        ValueError: for a model or sample inputs that are not on a CUDA device; for one with `delay_wgrad_compute`.
        TypeError: for sample inputs in another form.
    """
    if any(getattr(m, "delay_wgrad_compute", False) for m in model.modules()):
        raise ValueError("cuda_graph captures whole backwards: set delay_wgrad_compute to False")
    samples = _by_name(sample_inputs)
    named = list(samples)[1:]
    _check_devices(model, samples)
    within = GraphedRegion(model, samples["x"].device)
    # What the warm-up adds to main_grad is no gradient, and the largest magnitudes that it meets are none of a step.
    with restored(model.parameters()), asides_undisturbed(), being(capturing, True), _held_graphs_told():
        replay = torch.cuda.make_graphed_callables(
            _Positional(model, tuple(named), within),
            tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in samples.values()),
            num_warmup_iters=warmup,
            allow_unused_input=True,
        )
    return GraphedModel(model, replay, samples, within)


@contextlib.contextmanager
def _held_graphs_told() -> Iterator[None]:
    """In here CUDA's error for work on the default stream is put in words: mostly an autograd graph of before.

    After a capture that failed PyTorch (2.11) stays on its stream, and takes the default generator for captured: it
    refuses to draw from it until a capture ends well. An empty one does.
    """
    stream = torch.cuda.current_stream()
    try:
        yield
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty graph
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                pass
        torch.cuda.set_stream(stream)
        first = error.__context__ or error
        if "legacy stream" not in str(first):
            raise
        # The frames hold a part of the capture with the same autograd nodes, as long as the error is kept.
        for e in (error, first):
            traceback.clear_frames(e.__traceback__)
        raise RuntimeError(
            "cuda_graph: the capture met work on the default stream. An output or a loss of an earlier call, held with "
            "its autograd graph, brings it there, for one: delete it (del y), or detach it, before the capture"
        ) from error


class _Positional(torch.nn.Module):
    """The model with its named inputs by position, as PyTorch's capture passes them."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...], within: GraphedRegion) -> None:
        super().__init__()
        self.model, self._names, self._within = model, names, within
        self.training = model.training

    def forward(self, x: torch.Tensor, *inputs: torch.Tensor) -> Any:
        with self._within.forward():
            return self.model(x, **dict(zip(self._names, inputs, strict=True)))


def _main_grad_at(p: torch.Tensor) -> int:
    """Address of a parameter's main_grad; 0 where it has none."""
    held = held_main_grad(p)
    return 0 if held is None else held.data_ptr()


def _over(p: torch.Tensor) -> bool:
    """True where a parameter says that its gradient is written over its main_grad."""
    return bool(getattr(p, "overwrite_main_grad", False))


def _by_name(given: Any) -> dict[str, torch.Tensor]:
    """Sample inputs by name, "x" before the named ones."""
    x, *rest = given if isinstance(given, tuple) and given else (given,)
    named = rest[0] if rest and isinstance(rest[0], Mapping) else {}
    samples = {"x": x, **named}
    tensors = all(isinstance(t, torch.Tensor) for t in samples.values())
    if not tensors or len(rest) > 1 or (rest and rest[0] is not named):
        kinds = type(given).__name__
        if isinstance(given, tuple):
            kinds = f"({', '.join(type(part).__name__ for part in given)})"
        raise TypeError(f"cuda_graph takes x, (x,) or (x, {{name: tensor}}) as sample inputs, got {kinds}")
    return samples


def _check_devices(model: torch.nn.Module, samples: Mapping[str, torch.Tensor]) -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("cuda_graph needs a CUDA device, and PyTorch sees none here")
    tensors = {**samples, **{f"parameter {name}": p for name, p in model.named_parameters()}}
    for name, t in tensors.items():
        if t.device.type != "cuda":
            raise ValueError(f"cuda_graph captures what runs on a CUDA device; {name} is on {t.device}")


def _text(form: Form) -> str:
    shape, dtype, device, needs = form
    return f"{dtype} {list(shape)} on {device}" + (" with requires_grad" if needs else "")
