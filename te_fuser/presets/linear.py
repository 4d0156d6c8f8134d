"""Linear and LayerNormLinear: x W^T + b, behind a norm or not, of parameters that may be apart or come with calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from te_fuser import ops
from te_fuser.presets.base import Asked, Preset, cut, understands
from te_fuser.presets.keyword_arguments import Common, check_call, check_epsilon, check_flag, check_size, checked
from te_fuser.presets.keyword_types import LayerNormLinearKeys, LinearKeys, Unpack
from te_fuser.presets.norm import Normed, PresetNorm, filled

_DIMS = {"column": 0, "row": 1}  # mode -> the dimension of the weight that is cut


def linear_to_torch(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """torch.nn.Linear over copies of these."""
    rows, columns = weight.shape
    made = torch.nn.Linear(columns, rows, bias is not None, device=weight.device, dtype=weight.dtype)
    return filled(made, weight=weight, bias=bias)


@dataclass(frozen=True)
class AffineArguments(Common):
    """Keywords that `Linear` and `LayerNormLinear` share, documented at `Linear`."""

    parallel_mode: str | None = checked(None, _DIMS)
    skip_weight_param_allocation: bool = False
    return_bias: bool = False
    parameters_split: Iterable[str] | Mapping[str, int] | None = None


class Affine(Preset):
    """y = norm(x) W^T + bias, or without a norm, as `Linear` and `LayerNormLinear` say.

    Attributes:
        norm: what is at the head of the list, or None.
        parts: "weight" and "bias" -> the names of the parameters that are joined to it, mostly one.
    """

    flattens = True
    arguments: ClassVar[type[AffineArguments]] = AffineArguments

    def __init__(
        self, in_features: int, out_features: int, bias: bool, eps: float | None = None, **keywords: Any
    ) -> None:
        super().__init__(**keywords)
        said = self.common
        self.in_features = check_size("in_features", in_features)
        self.out_features = check_size("out_features", out_features)
        self.parallel_mode = said.parallel_mode
        self.use_bias, self.return_bias = check_flag("bias", bias), bool(said.return_bias)
        self.skip_weight_param_allocation = bool(said.skip_weight_param_allocation)
        sizes = _split(said.parameters_split, self.out_features)
        self.parts = {name: tuple(f"{part}_{name}" for part in sizes) or (name,) for name in ("weight", "bias")}
        self.norm: PresetNorm | None = None if eps is None else said.norm(self.in_features, eps)
        self._call = (ops.Given(),)  # no child: it has no state
        self._declare(tuple(sizes.values()) or (self.out_features,))
        self.reset_parameters()
        self.relist()

    def _declare(self, sizes: tuple[int, ...]) -> None:
        if self.norm is not None:
            self.norm.declare(self)
        if self.skip_weight_param_allocation:
            return
        dim, is_cut = _DIMS.get(self.parallel_mode or "", 0), self.parallel_mode is not None
        rows = [self.share(size, "out_features") if self.parallel_mode == "column" else size for size in sizes]
        columns = self.share(self.in_features, "in_features") if self.parallel_mode == "row" else self.in_features
        for name, size in zip(self.parts["weight"], rows, strict=True):
            self.declare(name, [size, columns], self.common.fill(), **cut(dim, is_cut))
        marks = cut(0, True) if self.parallel_mode == "column" else self.whole()
        for name, size in zip(self.parts["bias"], rows, strict=True):
            self.declare(name, [size] if self.use_bias else None, 0.0, **marks)
        if len(sizes) > 1:
            self.keep_together(*self.parts["weight"])
            if self.use_bias:
                self.keep_together(*self.parts["bias"])

    def __setattr__(self, name: str, value: Any) -> None:
        parts = self.__dict__.get("parts", {}).get(name, (name,))
        if isinstance(value, torch.nn.Parameter) and parts != (name,):
            self._join(name, value)
        else:
            super().__setattr__(name, value)

    def _join(self, name: str, whole: torch.nn.Parameter) -> None:
        """A parameter in place of those that are apart."""
        had = self._declared[self.parts[name][0]]
        for part in self.parts[name]:
            delattr(self, part)
            del self._declared[part]
        self.parts = {**self.parts, name: (name,)}
        self._declared[name] = had
        self.register_parameter(name, whole)
        self._settle()
        self.relist()

    def variant_ops(self, over: bool = False, given: tuple[str, ...] = ()) -> Iterator[torch.nn.Module]:  # type: ignore[override]
        """The ops of a call; `over` writes over main_grad, and weight or bias `given` come with the call."""
        if not (over or given):
            yield from self._ops()
            return
        for op in self.own_ops():
            yield self._from_call(self.writing_over(op) if over else op, given)

    def _from_call(self, op: torch.nn.Module, given: tuple[str, ...]) -> torch.nn.Module:
        """An op of this list, or one in its place that reads what comes with the call."""
        if isinstance(op, ops.Bound) and op.owner is self:
            own = op.op
            if isinstance(own, ops.MatMul) and "weight" in given:
                product = self.product_as(own, own.overwrite_main_grad is True)
                return ops.Bound(product, self._call[0], weight="weight")
            if isinstance(own, ops.Bias) and "bias" in given:
                return ops.Bound(self.bias_op(own.features).shared_as(own), self._call[0], bias="bias")
        return op

    def _ops(self) -> Iterator[torch.nn.Module]:
        if self.norm is not None:
            yield from self.norm.ops(self, before=self.parallel_mode)
        yield self._bound(self.product(self.in_features, self.out_features, self.parallel_mode), "weight")
        if self.use_bias and not self.return_bias:
            yield self._bound(self.bias_op(self.out_features, self.parallel_mode), "bias")

    def _bound(self, op: ops.FusableOperation, name: str) -> ops.Bound:
        if self.skip_weight_param_allocation:
            return ops.Bound(op, self._call[0], **{name: name})
        names = self.parts[name]
        return ops.Bound(op, self, **{name: names[0] if len(names) == 1 else names})

    @understands
    def forward(
        self,
        inp: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        **call: Any,
    ) -> Asked:
        """out[, bias][, layernorm_out].

        Args:
            inp: [..., in_features].
            weight, bias: in place of the preset's; the weight's must be given with skip_weight_param_allocation.
            is_first_microbatch: True writes the weight's gradient over its main_grad, None and False add to it. In a
                region of FP8 True quantizes weights and keeps them, False reads these, None quantizes them anew.
            fp8_output, fp8_grad: False.

        Raises:
            TypeError, ValueError, RuntimeError: for what the preset was not made for, before anything runs.
            NotImplementedError: for FP8.
        """
        self.check_group()
        gives_none = weight is None and bias is None and is_first_microbatch is None
        if gives_none and not (fp8_output or fp8_grad or call) and self.is_list:
            return Asked(self, inp)
        check_call(self, call)
        for name, wanted in (("fp8_output", fp8_output), ("fp8_grad", fp8_grad)):
            if wanted:
                raise NotImplementedError(
                    f"{type(self).__name__}: {name} asks for a result in 8 bits, which no preset gives; leave it out"
                )
        given = self._given_tensors(weight, bias)
        how = {"given": tuple(given)} if given and not self.skip_weight_param_allocation else {}
        held = self._call[0].holding(**given) if given else None
        returned = self.returned(self._bias(given), self.parallel_mode) if self.return_bias else None
        return self.answer(how, inp, call, is_first_microbatch, returned, held)

    @property
    def is_list(self) -> bool:
        return not (self.return_bias or self.skip_weight_param_allocation or self.asked())

    def asked(self) -> tuple[str, ...]:
        return () if self.norm is None or self.norm.output is None else (self.norm.output,)

    def _bias(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        if not self.use_bias:
            return None
        return given["bias"] if "bias" in given else self._whole("bias")

    def returned_terms(self) -> tuple[str, ...]:
        whole = self.sequence_parallel and self.tp_size > 1 and self.parallel_mode != "column"
        return self.parts["bias"] if whole and self.return_bias and self.use_bias else ()

    def _given_tensors(self, weight: Any, bias: Any) -> dict[str, torch.Tensor]:
        given = {name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None}
        name = type(self).__name__
        for argument, t in given.items():
            if not isinstance(t, torch.Tensor):
                raise TypeError(
                    f"{name}: {argument} takes a tensor in place of the preset's own, got {t!r} (forward(inp, weight, "
                    "bias, is_first_microbatch): give others by keyword)"
                )
        if "bias" in given and not self.use_bias:
            raise ValueError(f"{name} was made with bias=False, got a bias: leave it out, or make it with bias=True")
        if self.skip_weight_param_allocation:
            missing = [n for n in ("weight", "bias")[: 1 + self.use_bias] if n not in given]
            if missing:
                raise TypeError(
                    f"{name} was made with skip_weight_param_allocation=True: give {' and '.join(missing)} in the call"
                )
        return given

    def linear_to_torch(self) -> torch.nn.Module:
        """Product and bias as torch.nn.Linear, over copies of the parameters."""
        self.check_one_value("to_torch()")
        if self.skip_weight_param_allocation:
            raise TypeError(f"to_torch(): {type(self).__name__} has no weight, by skip_weight_param_allocation")
        return linear_to_torch(self._whole("weight"), self._whole("bias") if self.use_bias else None)

    def _whole(self, name: str) -> torch.Tensor:
        parts: list[torch.Tensor] = [self.get_parameter(part) for part in self.parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.use_bias}"


def _split(given: Iterable[str] | Mapping[str, int] | None, rows: int) -> dict[str, int]:
    """Name -> rows of each part; empty where the parameters are whole."""
    if given is None:
        return {}
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"parameters_split takes names, or names with sizes, got {given!r}: ('query', 'key'), say")
    names = [str(name).rstrip("_") for name in given]
    if not names or len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise ValueError(f"parameters_split takes different names of parameters, got {list(given)}")
    if isinstance(given, Mapping):
        sizes = [check_size(f"parameters_split[{name!r}]", size) for name, size in given.items()]
    elif rows % len(names):
        raise ValueError(f"parameters_split makes {len(names)} equal parts of out_features={rows}: give their sizes")
    else:
        sizes = [rows // len(names)] * len(names)
    if sum(sizes) != rows:
        raise ValueError(f"parameters_split has {sum(sizes)} rows, got out_features={rows}: make them equal")
    return dict(zip(names, sizes, strict=True))


class Linear(Affine):
    """y = x W^T + bias.

    Args:
        in_features: the size of x's last dimension; x is [..., in_features].
        out_features: the size of y's; `weight` is [out_features, in_features], `bias` [out_features].
        bias: whether there is one.
        parallel_mode: "column" or "row" (in upper or lower case): the sharded dimension of the weight, see `ops.Cut`.
        skip_weight_param_allocation: no parameters; each call passes weight and bias.
        return_bias: the bias is not added but returned: (y, bias).
        parameters_split: names of equal parts, or a mapping from names to sizes: each part has parameters of its own,
            {name}_weight and {name}_bias; they lie in one buffer.
        **keywords: what presets share, see `te_fuser.presets.keyword_arguments.Common`, and options of lists.
    """

    flattens = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **keywords: Unpack[LinearKeys]) -> None:
        super().__init__(in_features, out_features, bias, **keywords)

    def to_torch(self) -> torch.nn.Module:
        """torch.nn.Linear with the same function, over copies of the parameters."""
        return self.linear_to_torch().train(self.training)


@dataclass(frozen=True)
class LayerNormLinearArguments(AffineArguments, Normed):
    """Keywords of `LayerNormLinear`, documented there."""


class LayerNormLinear(Affine):
    """y = norm(x) W^T + bias.

    Args:
        in_features: the size of x's last dimension; x is [..., in_features].
        out_features: the size of y's; `weight` is [out_features, in_features], `bias` [out_features].
        eps: added to the norm's variance.
        bias: whether there is one.
        normalization: "LayerNorm" or "RMSNorm"; its parameters are `layer_norm_weight` and `layer_norm_bias`.
        zero_centered_gamma: the norm's factor is 1 + its weight, which starts at 0.
        return_layernorm_output: calls return what the norm gives, too, behind everything else.
        return_layernorm_output_gathered: with `sequence_parallel` and "column" it has the rows of all ranks, and its
            gradient is summed over them; otherwise this rank's rows.
        parallel_mode, skip_weight_param_allocation, return_bias, parameters_split: see `Linear`.
        **keywords: what presets share, see `te_fuser.presets.keyword_arguments.Common`, and options of lists.
    """

    flattens = True
    arguments = LayerNormLinearArguments

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        **keywords: Unpack[LayerNormLinearKeys],
    ) -> None:
        super().__init__(in_features, out_features, bias, check_epsilon("eps", eps), **keywords)
        self.eps = eps

    def to_torch(self) -> torch.nn.Module:
        """torch.nn.Sequential of a norm and a Linear with the same function, over copies of the parameters."""
        weight, bias = self.get_parameter("layer_norm_weight"), self._parameters.get("layer_norm_bias")
        assert self.norm is not None
        return torch.nn.Sequential(self.norm.to_torch(weight, bias), self.linear_to_torch()).train(self.training)
