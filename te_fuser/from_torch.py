"""from_torch: a module of torch.nn as ops that share its parameters, under the same names, checked on random input."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from te_fuser import ops
from te_fuser.compare import distance, in_eval_mode
from te_fuser.ops.attention.heads import one_of
from te_fuser.ops.attention.mask import MASKS
from te_fuser.ops.base import FusableOperation, walk
from te_fuser.ops.checks import described, no_tensor
from te_fuser.ops.hooks import hooks_of
from te_fuser.sequential import Sequential

_OPS = (FusableOperation, Sequential)
_SHOWN = 3  # lines of a hint
_SIZES = ("in_features", "normalized_shape", "embed_dim")  # what modules call the trailing sizes of their input


def from_torch(
    module: nn.Module, x: torch.Tensor | None = None, *, mask: str = "none", check: bool = True
) -> FusableOperation | Sequential:
    """Convert a module of torch.nn to a list of ops that shares its parameters under their names.

    Takes Linear, LayerNorm, RMSNorm, GELU, ReLU, SiLU, Sigmoid, Tanh, GLU, Softmax, LogSoftmax, Dropout, Identity,
    Flatten, Unflatten, MultiheadAttention (as self-attention, model(x) for mha(x, x, x)[0]), TransformerEncoderLayer,
    TransformerEncoder, Sequential of these, and modules with a method `as_ops`. Other modules stay in the list as they
    are, and a warning names them with the reason. `module` itself keeps working.

    `module.as_ops(convert)` gives a module's ops; `convert(name, child)` those of a module in it.

    Args:
        module: what to convert.
        x: an input to check with; by default random numbers, [4, 4, features] or else [4, features], or ids where an
            Embedding comes first.
        mask: attention's mask: "none", "causal", "given" or "causal_and_given"; calls give it as `attention_mask`,
            boolean, True = hidden, as in torch.nn.
        check: compare output and gradient with the module's, in eval mode, on that input.

    Raises:
        TypeError: for no module, one that cannot be converted, or with a mask one whose attention cannot.
        ValueError: for another mask, for a mask without attention, or when there is no input to check with.
        RuntimeError: when the check finds another output or gradient.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"from_torch takes a torch.nn.Module, got {described(module)}")
    if not (x is None or isinstance(x, torch.Tensor)):
        raise no_tensor("from_torch(module, x)", x)
    conversion = _Converter(one_of("mask", mask, MASKS))
    attention = next((m for m in module.modules() if isinstance(m, nn.MultiheadAttention)), None)
    if mask != "none" and attention is None:
        raise ValueError(f"from_torch: there is no attention in this {type(module).__name__} to take mask={mask!r}")
    try:
        made = conversion.convert(module, "")
    except _Cannot as no:
        alone = "" if any(module.children()) else "in a te_fuser.Sequential it runs by itself, as it is"
        kind, to_do = type(module).__name__, lines_to_write(module, "model") or alone
        raise TypeError(f"from_torch cannot turn {kind} into ops: {no}{'; ' * bool(to_do)}{to_do}") from None
    if check:
        _check(module, made, x, mask, attention is not None and attention.batch_first)
    if conversion.left:
        named = "; ".join(f"{path!r} ({kind}): {why}" for path, (kind, why) in conversion.left.items())
        warnings.warn(f"from_torch left these as they are, to run by themselves: {named}", stacklevel=2)
    return made


def lines_to_write(module: nn.Module, name: str) -> str:
    """Hint with lines that convert the largest parts of a module called with x alone."""
    found = [*_parts(module, name)]
    more = f", and so {len(found) - _SHOWN} more of its parts" if len(found) > _SHOWN else ""
    lines = ", ".join(f"{part} = te_fuser.from_torch({part})" for part in found[:_SHOWN])
    return f"of its parts convert those that are torch.nn's: {lines}{more}" if found else ""


def converts(module: nn.Module) -> bool:
    """True where from_torch makes ops of a module, which may stand in its place."""
    if isinstance(module, (*_OPS, nn.MultiheadAttention)):  # the latter as ops is called with x alone
        return False
    try:
        return not why_none(module)
    except Exception:  # of a user's as_ops, too
        return False


def _parts(module: nn.Module, name: str) -> Iterator[str]:
    listed = isinstance(module, (nn.ModuleList, nn.Sequential))
    if type(module).__module__.startswith("torch.nn.") and not (listed or isinstance(module, nn.ModuleDict)):
        return
    for key, child in module.named_children():
        path = f"{name}[{key}]" if listed else f"{name}.{key}"
        if converts(child):
            yield path
        elif not isinstance(child, _OPS):
            yield from _parts(child, path)


def why_none(module: nn.Module) -> str:
    """Reason why no ops could stand for a module or a part; empty where some could."""
    if callable(getattr(module, "as_ops", None)):
        return ""
    conversion = _Converter("none")
    try:
        made = conversion.convert(module, "")
    except _Cannot as no:
        return str(no)
    left = [f"{path} ({kind}): {why}" for path, (kind, why) in conversion.left.items()]
    return "" if any(walk(made)) else "; ".join(left) or "nothing is in it"


class SelfAttention(Sequential):
    """torch.nn.MultiheadAttention of one input: y = mha(x, x, x)[0]."""

    def __init__(self, mha: nn.MultiheadAttention, mask: str) -> None:
        features = mha.embed_dim
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["project"] = ops.Bound(ops.MatMul(features, 3 * features, device="meta"), self, weight="in_proj_weight")
        if mha.in_proj_bias is not None:
            parts["shift"] = ops.Bound(ops.Bias(3 * features, device="meta"), self, bias="in_proj_bias")
        parts["attention"] = ops.DotProductAttention(
            mha.num_heads,
            mha.head_dim,
            mask=mask,
            dropout=mha.dropout,
            layout="batch_first" if mha.batch_first else "sequence_first",
            packing="blocked",
        )
        parts["out_proj"] = _linear(mha.out_proj)
        super().__init__(parts)
        _share(mha, self)


class _Cannot(Exception):
    """A module that is not converted, and why."""


@dataclass
class _Converter:
    """One call of from_torch.

    Attributes:
        left: path -> class and reason, of modules that stay as they are.
        made: what came of each module, by its id; one that stands in two places stays one.
        done: modules that are in the mode, training or not, in which they are to be.
    """

    mask: str
    left: dict[str, tuple[str, str]] = field(default_factory=dict)
    made: dict[int, Any] = field(default_factory=dict)
    done: set[nn.Module] = field(default_factory=set)

    def convert(self, module: nn.Module, path: str) -> Any:
        """The module as ops; _Cannot where it is unknown, or was changed."""
        if isinstance(module, _OPS):
            self.done.update(module.modules())
            return module
        if id(module) not in self.made:
            _check_plain(module)
            made = self._converted(module, path)
            mine, theirs = ({n: id(t) for n, t in _tensors(m)} for m in (made, module))
            if mine != theirs:
                other = ", ".join(sorted(n for n in {*mine, *theirs} if mine.get(n) != theirs.get(n)))
                raise _Cannot(f"it has parameters or buffers that the op has not: {other}")
            self._settle(made, module.training)
            self.made[id(module)] = made
        return self.made[id(module)]

    def _converted(self, module: nn.Module, path: str) -> Any:
        says: Any = getattr(module, "as_ops", None)
        if callable(says):
            return says(lambda name, child: self.part(child, f"{path}.{name}"))
        kind = _kind(module)
        return _BLOCKS[kind](self, module, path) if kind in _BLOCKS else _SINGLE[kind](module)

    def part(self, module: nn.Module, path: str) -> Any:
        """Ops that stand for a module in a list, or the module itself."""
        try:
            return self.convert(module, path)
        except _Cannot as no:
            path = path.removeprefix(".")
            if self.mask != "none" and any(isinstance(m, nn.MultiheadAttention) for m in module.modules()):
                raise _Cannot(f"{path!r} ({type(module).__name__}), which would run without its mask: {no}") from None
            self.left[path] = type(module).__name__, str(no)
            self.done.update(module.modules())
            return module

    def parts(self, modules: Mapping[str, nn.Module | None], path: str) -> Sequential:
        """A list of what stands for each."""
        there = [(name, m) for name, m in modules.items() if m is not None]
        return Sequential(OrderedDict((name, self.part(m, f"{path}.{name}")) for name, m in there))

    def _settle(self, made: nn.Module, training: bool) -> None:
        for part in made.modules():
            if part not in self.done:
                part.training = training
                self.done.add(part)


def _check_plain(module: nn.Module) -> None:
    """Refuse a module that was changed after it was made, and so may mean something else."""
    if any(hooks_of(module)):
        raise _Cannot("it has hooks, which run with the module alone")
    if is_parametrized(module):
        raise _Cannot("its parameters are computed: parametrize the op in its place")
    if "forward" in module.__dict__ or type(module).__call__ is not nn.Module.__call__:
        raise _Cannot("it has a forward of its own")


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# ------------------------------------------------------------------------------------------------ class by class


def _share(module: nn.Module, op: Any) -> Any:
    """`op` with the module's parameters."""
    for name, parameter in module._parameters.items():
        setattr(op, name, parameter)
    return op


def _linear(m: nn.Linear) -> Any:
    _check_plain(m)
    rows, columns = m.weight.shape  # in_features and out_features may be those before it was pruned
    if not rows:
        raise _Cannot("it gives 0 features, and no op adds a bias to none or goes on with them")
    return _share(m, ops.Linear(columns, rows, bias=m.bias is not None, device="meta"))


def _affine(m: nn.LayerNorm | nn.RMSNorm) -> dict[str, Any]:
    """The keywords of a norm that tell how it scales; weights come from the module."""
    return {"elementwise_affine": m.weight is not None, "device": "meta"}


def _rms_norm(m: nn.RMSNorm) -> Any:
    eps = m.eps
    if eps is None:  # that of the dtype in which torch computes
        if m.weight is None:
            raise _Cannot("its eps follows the dtype of x: give it one")
        eps = torch.finfo(torch.float64 if m.weight.dtype == torch.float64 else torch.float32).eps
    return _share(m, ops.RMSNorm(m.normalized_shape, eps, **_affine(m)))


def _over_features(m: nn.Module, op: FusableOperation) -> FusableOperation:
    """An op over the last dimension for a module that says over which."""
    if m.dim != -1:
        raise _Cannot(f"it works over dim={m.dim}, the op over the features, dim=-1")
    return op


def _unflatten(m: nn.Unflatten) -> Any:
    if not isinstance(m.dim, int) or not all(isinstance(size, int) for size in m.unflattened_size):
        raise _Cannot("it names its dimensions")
    return ops.Unflatten(m.dim, m.unflattened_size)  # type: ignore[arg-type]


def _attention(conversion: _Converter, m: nn.MultiheadAttention, path: str) -> Any:
    if not m._qkv_same_embed_dim:
        raise _Cannot(f"its keys and values come from other tensors, of kdim={m.kdim} and vdim={m.vdim} features")
    if m.bias_k is not None or m.add_zero_attn:
        raise _Cannot("it adds keys and values of its own (add_bias_kv, add_zero_attn)")
    return SelfAttention(m, conversion.mask)


# A function as TransformerEncoderLayer takes it -> the op.
_FUNCTIONS: dict[Any, Callable[[], FusableOperation]] = {
    F.relu: ops.ReLU,
    torch.relu: ops.ReLU,
    F.gelu: lambda: ops.GELU("none"),
    F.silu: ops.SiLU,
    torch.tanh: ops.Tanh,
    torch.sigmoid: ops.Sigmoid,
}


def _encoder_layer(conversion: _Converter, m: nn.TransformerEncoderLayer, path: str) -> Any:
    activation = m.activation
    if not isinstance(activation, nn.Module):
        if activation not in _FUNCTIONS:
            raise _Cannot(f"its activation is the function {getattr(activation, '__name__', activation)!r}")
        activation = _FUNCTIONS[activation]()
    attend: dict[str, Any] = {"self_attn": conversion.convert(m.self_attn, f"{path}.self_attn"), "dropout1": m.dropout1}
    behind = {name: getattr(m, name) for name in ("dropout", "linear2", "dropout2")}
    feed = {"linear1": m.linear1, "activation": activation, **behind}
    listed: dict[str, Any] = {}
    for k, branch in enumerate((attend, feed), start=1):
        norm = {f"norm{k}": getattr(m, f"norm{k}")}
        inside = {**norm, **branch} if m.norm_first else branch
        around = {f"fork{k}": ops.Fork(f"x{k}"), **inside, f"add{k}": ops.Add(f"x{k}")}
        listed |= around if m.norm_first else {**around, **norm}
    return conversion.parts(listed, path)


def _decoder(conversion: _Converter, m: nn.Module, path: str) -> Any:
    raise _Cannot("it attends to keys and values of another tensor, an input that a list of ops has to name")


# Class -> the op.
_SINGLE: dict[type[nn.Module], Callable[[Any], Any]] = {
    nn.Linear: _linear,
    nn.LayerNorm: lambda m: _share(m, ops.LayerNorm(m.normalized_shape, m.eps, **_affine(m), bias=m.bias is not None)),
    nn.RMSNorm: _rms_norm,
    nn.GELU: lambda m: ops.GELU(m.approximate),
    nn.ReLU: lambda m: ops.ReLU(),
    nn.SiLU: lambda m: ops.SiLU(),
    nn.Sigmoid: lambda m: ops.Sigmoid(),
    nn.Tanh: lambda m: ops.Tanh(),
    nn.GLU: lambda m: _over_features(m, ops.GLU(gate_first=False)),
    nn.Softmax: lambda m: _over_features(m, ops.Softmax()),
    nn.LogSoftmax: lambda m: _over_features(m, ops.LogSoftmax()),
    nn.Dropout: lambda m: ops.Dropout(m.p),
    nn.Identity: lambda m: ops.Identity(),
    nn.Flatten: lambda m: ops.Flatten(m.start_dim, m.end_dim),
    nn.Unflatten: _unflatten,
}
# Class -> the list, of what has other modules or several products in it.
_BLOCKS: dict[type[nn.Module], Callable[[_Converter, Any, str], Any]] = {
    nn.Sequential: lambda conversion, m, path: conversion.parts(m._modules, path),
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerEncoder: lambda conversion, m, path: conversion.parts(
        {"layers": conversion.parts(m.layers._modules, f"{path}.layers"), "norm": m.norm}, path
    ),
    **dict.fromkeys((nn.TransformerDecoderLayer, nn.TransformerDecoder, nn.Transformer), _decoder),
}
_COMPUTING = ("forward", "_sa_block", "_ff_block")  # the methods that say what a module computes


def _kind(module: nn.Module) -> type[nn.Module]:
    """The class that says how a module is converted, maybe a base of its own."""
    for kind in (*_SINGLE, *_BLOCKS):
        if isinstance(module, kind):
            own = [name for name in _COMPUTING if getattr(type(module), name, None) is not getattr(kind, name, None)]
            if own:
                raise _Cannot(f"it is a {kind.__name__} with a {own[0]} of its own")
            return kind
    raise _Cannot("te_fuser has no op for it")


# ------------------------------------------------------------------------------------------------------ the check


def _check(module: nn.Module, made: nn.Module, x: torch.Tensor | None, mask: str, batch_first: bool) -> None:
    """Compare the ops by their meaning with the module, both in eval mode."""
    if any(t.is_meta for _, t in _tensors(module)):
        raise ValueError("from_torch cannot check a module on the meta device: give check=False")
    inputs = _random_inputs(module) if x is None else [x.detach()]
    if inputs[0].is_meta:
        raise ValueError("from_torch cannot check with an x on the meta device: give one with values, or check=False")
    device = inputs[0].device
    hidden = None
    if mask != "none":  # [positions, positions], True = hidden; every position sees itself
        (causal, given), positions = MASKS[mask], inputs[0].shape[int(batch_first)]
        hidden = _normal(positions, positions, seed=2) > (0.3 if given else torch.inf)
        if causal:
            hidden |= torch.ones_like(hidden).triu(1)
        hidden = hidden.fill_diagonal_(False).to(device)
    named = {"attention_mask": hidden} if hidden is not None and MASKS[mask][1] else {}
    with in_eval_mode(module, made), torch.autocast(device.type, enabled=False), torch.inference_mode(False):
        x, wanted = _by_module(module, inputs, hidden, "random numbers" if x is None else "x")
        found = _with_gradient(lambda x: Sequential(made).reference(x, outputs=(), **named), x)
    for what, want in wanted.items():
        scale, allowed = want.abs().max().item() if want.numel() else 0.0, torch.finfo(want.dtype).eps ** 0.5
        apart = distance(found[what], want).largest
        if apart > allowed * max(torch.finfo(want.dtype).tiny, scale):  # a NaN that both have is no distance
            raise RuntimeError(
                f"from_torch: the {what} of the ops lies {apart:.2e} from the module's, whose largest is {scale:.2e}, "
                f"for an input {list(x.shape)}: one of its modules computes something else than its class does, or not "
                "the same twice"
            )


def _by_module(
    module: nn.Module, inputs: Sequence[torch.Tensor], hidden: torch.Tensor | None, what: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The first input that the module takes, with results."""
    failed: list[Exception] = []
    for x in inputs:
        try:
            return x, _with_gradient(lambda x: _call(module, x, hidden), x)
        except _NoTensorError as error:
            raise TypeError(f"from_torch compares tensors, and the module gives a {error}: give check=False") from None
        except Exception as error:
            failed.append(error)
    tried = " or ".join(str(list(x.shape)) for x in inputs)
    raise ValueError(
        f"from_torch checks itself by a call, and the module does not take {what} {tried}: give x, an input that it "
        f"takes, or check=False ({failed[0]})"
    ) from failed[0]


def _call(module: nn.Module, x: torch.Tensor, hidden: torch.Tensor | None) -> Any:
    """The module of x, where it attends to x alone and does not see what is hidden."""
    try:
        _check_plain(module)
        _kind(module)
    except _Cannot:  # the list has the module itself
        return module(x)
    if type(module).forward is nn.Sequential.forward:
        for child in module._modules.values():
            x = x if child is None else _call(child, x, hidden)
        return x
    if isinstance(module, nn.MultiheadAttention):
        return module(x, x, x, attn_mask=hidden, need_weights=False)[0]
    if isinstance(module, nn.TransformerEncoderLayer):
        return module(x, src_mask=hidden)
    if isinstance(module, nn.TransformerEncoder):
        return module(x, mask=hidden)
    return module(x)


class _NoTensorError(Exception):
    """A result that is no tensor, by the name of its class."""


def _with_gradient(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output, and the input's gradient where it has one."""
    with torch.enable_grad():
        x = x.clone().requires_grad_(x.is_floating_point())
        y = run(x.clone())  # a module may write over its input
        if not isinstance(y, torch.Tensor):
            raise _NoTensorError(type(y).__name__)
        if not x.requires_grad:
            return {"output": y.detach()}
        dy = _normal(*y.shape, seed=1).to(y)
        return {"output": y.detach(), "input's gradient": torch.autograd.grad(y, x, dy)[0]}


def _normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


def _random_inputs(module: nn.Module) -> list[torch.Tensor]:
    """[4, 4, features] as the first module says, and [4, features] without attention."""
    like = next((p for p in module.parameters() if p.is_floating_point()), torch.empty(0))
    for m in module.modules():
        if isinstance(m, nn.Embedding):
            return [torch.arange(16, device=like.device).view(4, 4) % m.num_embeddings]
    sizes = [size for m in module.modules() for name in _SIZES if (size := getattr(m, name, None)) is not None]
    row = (8,) if not sizes else (sizes[0],) if isinstance(sizes[0], int) else sizes[0]
    leads = ((4, 4),) if any(isinstance(m, nn.MultiheadAttention) for m in module.modules()) else ((4, 4), (4,))
    return [_normal(*lead, *row, seed=0).to(like) for lead in leads]
