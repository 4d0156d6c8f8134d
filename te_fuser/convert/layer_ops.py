"""Members of a list in place of a layer's modules: an op bound to a module's parameters, or the module itself."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import nn

from te_fuser import ops
from te_fuser.distributed.dtensor import is_dtensor
from te_fuser.guards import Facts
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.hooks import hooks_of

_RECORDING = "transformers.utils.output_capturing"  # whose hooks do nothing unless a call asks for what they record
_EPSILONS = ("eps", "variance_epsilon")


class Theirs(nn.Module):
    """Modules of the model run by their own __call__: [m(x) for each, joined by features]."""

    by_itself = "it is not converted: see `left` of the conversion"

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.__dict__["_run"] = modules

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [m(x) for m in self.__dict__["_run"]]
        return made[0] if len(made) == 1 else torch.cat(made, -1)


@dataclass
class LayerParts:
    """The parts of one layer, as a list takes them.

    Attributes:
        left: path in the layer -> why the module there runs by itself.
        joined: names of parameters that an op reads as one.
        numbers: where the numbers lie that ops were made with, and under which name.
        linears: the parameters of what has a bias or none, and weights of this shape or that.
    """

    owner: nn.Module
    left: dict[str, str] = field(default_factory=dict)
    joined: list[list[str]] = field(default_factory=list)
    numbers: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    linears: list[dict[str, Any]] = field(default_factory=list)

    def module(self, path: str) -> nn.Module:
        """The module of that path in the layer."""
        return self.owner.get_submodule(path)

    def is_left(self, path: str, kind: type[nn.Module]) -> bool:
        """True where the module there has to run by itself; `left` then has the reason."""
        why = why_left(self.module(path), kind)
        if why is not None:
            self.left[path] = why
        return why is not None

    def linear(self, *paths: str) -> list[nn.Module]:
        """The torch.nn.Linears there, of one input, as one product."""
        modules: list[Any] = [self.module(path) for path in paths]
        self.linears += [m._parameters for m in modules]
        left = [self.is_left(path, nn.Linear) for path in paths]
        if any(left) or self._differ(paths, modules):
            return [Theirs(*modules)]
        # Pruning may replace weights and leave the attributes; FSDP may leave weights without a shape.
        shapes = [_form(m._parameters)[1] or (m.out_features, m.in_features) for m in modules]
        columns = sum(rows for rows, _ in shapes)
        product = ops.MatMul(shapes[0][1], columns, device="meta")
        made: list[nn.Module] = [ops.Bound(product, self.owner, weight=self._join("weight", paths))]
        if modules[0].bias is not None:
            made.append(ops.Bound(ops.Bias(columns, device="meta"), self.owner, bias=self._join("bias", paths)))
        return made

    def _join(self, name: str, paths: Sequence[str]) -> list[str]:
        names = [f"{path}.{name}" for path in paths]
        if len(names) > 1:
            self.joined.append(names)
        return names

    def _differ(self, paths: Sequence[str], modules: Sequence[Any]) -> bool:
        kinds = {(m.weight.dtype, m.weight.device, m.bias is None) for m in modules}
        if len(kinds) > 1:
            self.left[paths[0]] = f"its dtype, device or bias is not that of {', '.join(paths[1:])}"
        return len(kinds) > 1

    def norm(self, path: str, kind: type[nn.Module], made: Callable[[Any], FusableOperation]) -> list[nn.Module]:
        """The norm there, which has its weight and bias, as `made` turns it into an op."""
        module = self.module(path)
        if self.is_left(path, kind):
            return [Theirs(module)]
        self.note_eps(module)
        return [ops.Bound(made(module), self.owner, **{name: f"{path}.{name}" for name in module._parameters})]

    def note_eps(self, norm: nn.Module) -> None:
        """Have the list made anew when the norm's epsilon is another."""
        kept = norm.__dict__
        self.numbers += [(kept, name) for name in _EPSILONS if name in kept]

    def facts(self) -> Facts:
        """Facts about the numbers and linear layers that ops were made with."""
        items = Facts(items=tuple([(kept, name, kept.get(name)) for kept, name in self.numbers]))
        return Facts.of([items, Facts.of_answers(*(functools.partial(_form, p) for p in self.linears))])


def _form(parameters: Mapping[str, Any]) -> tuple[bool, Any]:
    """(has a bias, [rows, columns] of a weight that is there as a matrix or else None)."""
    weight = parameters.get("weight")
    return parameters.get("bias") is not None, None if weight is None or weight.dim() != 2 else weight.shape


def why_left(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Reason why a module runs by itself, not being what its class says."""
    if any(getattr(hook, "__module__", "") != _RECORDING for hooks in hooks_of(module) for hook in hooks.values()):
        return "it has hooks, which run with the module alone"
    if has_own_forward(module) or type(module).__call__ is not nn.Module.__call__:
        return "it has a forward of its own"
    if type(module).forward is not kind.forward:
        name = type(module).__name__
        return f"it is a {f'{type(module).__module__}.{name}' if name == kind.__name__ else name}, no {kind.__name__}"
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) not in (nn.Parameter, torch.Tensor):
            return f"its {name} is a {type(parameter).__name__}"
    return None


def why_shared(attention: nn.Module) -> str | None:
    """Reason why attention runs by itself where ranks share heads, by `tp_plan` say."""
    for name, module in attention.named_children():
        if has_own_forward(module) and any(is_dtensor(p) for p in module._parameters.values()):
            return f"its {name} is cut for the ranks of a mesh (tp_plan), each of which has some of its heads"
    return None


def has_own_forward(module: nn.Module) -> bool:
    """True where a module runs another forward than its class's."""
    found = module.__dict__.get("forward")
    return found is not None and not _is_of_class(found, module)


def keeps_forward(layer: nn.Module) -> bool:
    """True where accelerate runs in a layer's place, and calls its forward."""
    return "_hf_hook" in layer.__dict__ and _is_of_class(layer.__dict__.get("_old_forward"), layer)


def become(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Make a layer one of another class, and so what wrappers have kept of its forward."""
    kept = [name for name, value in layer.__dict__.items() if _is_of_class(value, layer)]
    layer.__class__ = kind
    for name in kept:
        del layer.__dict__[name]
        if name != "forward":
            layer.__dict__[name] = MethodType(kind.forward, layer)


def _is_of_class(found: Any, module: nn.Module) -> bool:
    method = isinstance(found, MethodType) and found.__self__ is module
    return method and found.__func__ is type(module).forward
