"""LayerNormMLP: a norm, and two products around an activation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from te_fuser import ops
from te_fuser.presets.attention_base import own_rows, plans_ahead
from te_fuser.presets.base import Asked, Preset, TorchOp, cut, understands
from te_fuser.presets.keyword_arguments import check_call, check_choice, check_flag, check_size, checked
from te_fuser.presets.keyword_types import LayerNormMLPKeys, Unpack
from te_fuser.presets.linear import linear_to_torch
from te_fuser.presets.norm import Normed

ACTIVATIONS: dict[str, type[ops.FusableOperation]] = {
    "gelu": ops.GELU,
    "geglu": ops.GEGLU,
    "glu": ops.GLU,
    "qgelu": ops.QGELU,
    "qgeglu": ops.QGEGLU,
    "relu": ops.ReLU,
    "reglu": ops.ReGLU,
    "srelu": ops.SReLU,
    "sreglu": ops.SReGLU,
    "silu": ops.SiLU,
    "swiglu": ops.SwiGLU,
    "clamped_swiglu": ops.ClampedSwiGLU,
}
# What activation_params may say -> the op's argument.
_TAKES = {"clamped_swiglu": {"limit": "limit", "alpha": "alpha", "glu_linear_offset": "offset"}}


def activation_op(name: str, params: Mapping[str, Any] | None = None) -> ops.FusableOperation:
    """The activation of that name; of a gated one, [..., 2n] -> [..., n], the gate comes first.

    `params` are for "clamped_swiglu": limit (7.0), alpha (1.702) and glu_linear_offset (1.0); others take none.
    """
    name = check_choice("activation", name, ACTIVATIONS)
    if not (params is None or isinstance(params, Mapping)):
        raise TypeError(f"activation_params is a mapping of names to numbers, got {params!r}")
    takes = _TAKES.get(name, {})
    unknown = sorted(str(key) for key in params or () if key not in takes)
    if unknown:
        raise ValueError(
            f"activation_params: {name!r} takes {', '.join(takes) or 'none'}, got {', '.join(unknown)}: leave it out"
        )
    return ACTIVATIONS[name](**{takes[key]: value for key, value in (params or {}).items()})


def widens(name: str) -> bool:
    """True where the activation takes twice the features that it gives."""
    return issubclass(ACTIVATIONS[check_choice("activation", name, ACTIVATIONS)], ops.GatedUnit)


def activation_to_torch(op: ops.FusableOperation) -> torch.nn.Module:
    """A torch module with the same function."""
    make = _MODULES.get(type(op))
    return TorchActivation(op) if make is None else make()


class TorchActivation(TorchOp):
    """An activation that torch.nn lacks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The activation of x."""
        op = self._op[0]
        if isinstance(op, ops.ClampedSwiGLU):
            gate, linear = x.chunk(2, -1)
            gate, linear = gate.clamp(max=op.limit), linear.clamp(-op.limit, op.limit)
            return gate * torch.sigmoid(op.alpha * gate) * (linear + op.offset)
        if isinstance(op, ops.GatedUnit):
            gate, linear = x.chunk(2, -1)
            return _FUNCTIONS[type(op)](gate) * linear
        return _FUNCTIONS[type(op)](x)

    def extra_repr(self) -> str:
        return type(self._op[0]).__name__


def _qgelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _srelu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


_MODULES: dict[type[ops.FusableOperation], Callable[[], torch.nn.Module]] = {
    ops.GELU: lambda: torch.nn.GELU("tanh"),
    ops.ReLU: torch.nn.ReLU,
    ops.SiLU: torch.nn.SiLU,
}
# Op -> its function; of a gated one, what is applied to the gate.
_FUNCTIONS: dict[type[ops.FusableOperation], Callable[[torch.Tensor], torch.Tensor]] = {
    ops.QGELU: _qgelu,
    ops.SReLU: _srelu,
    ops.GEGLU: lambda gate: F.gelu(gate, approximate="tanh"),
    ops.GLU: torch.sigmoid,
    ops.QGEGLU: _qgelu,
    ops.ReGLU: F.relu,
    ops.SReGLU: _srelu,
    ops.SwiGLU: F.silu,
}


@dataclass(frozen=True)
class LayerNormMLPArguments(Normed):
    """Keywords of `LayerNormMLP`, documented there."""

    fc1_bias: bool | None = checked(None, check_flag)
    activation: str = "gelu"
    activation_params: Mapping[str, float] | None = None
    return_bias: bool = False
    set_parallel_mode: bool = False
    checkpoint: bool = False
    seq_length: int | None = checked(None, check_size)
    micro_batch_size: int | None = checked(None, check_size)


class LayerNormMLP(Preset):
    """y = act(norm(x) W1^T + b1) W2^T + b2.

    Args:
        hidden_size: features of x and y, [..., hidden_size].
        ffn_hidden_size: features between activation and second product; a gated activation takes twice as many.
        eps: added to the norm's variance.
        bias: True for fc1_bias and fc2_bias.
        fc1_bias: True for fc1_bias, False for none; None: as `bias`, or as in a checkpoint that is loaded.
        normalization, zero_centered_gamma, return_layernorm_output, return_layernorm_output_gathered: see
            `te_fuser.presets.norm.Normed`.
        activation: "gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu", "swiglu" or
            "clamped_swiglu"; the gate of a gated one comes first.
        activation_params: of "clamped_swiglu", limit (7.0), alpha (1.702) and glu_linear_offset (1.0).
        return_bias: fc2_bias is not added but returned: (y, bias).
        set_parallel_mode: ranks of `tp_group` cut the first product by columns and the second by rows.
        checkpoint: backward keeps the input alone and computes the rest again; a list runs the preset by itself then.
        seq_length, micro_batch_size: where both are given, calls with [seq_length, micro_batch_size, hidden_size] are
            planned, and what they need is compiled, when the preset is made.
        **keywords: these, what presets share, see `te_fuser.presets.keyword_arguments.Common`, and options of lists.
    """

    flattens = True
    arguments = LayerNormMLPArguments

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        **keywords: Unpack[LayerNormMLPKeys],
    ) -> None:
        super().__init__(**keywords)
        said = self.common
        self.hidden_size = check_size("hidden_size", hidden_size)
        self.ffn_hidden_size = check_size("ffn_hidden_size", ffn_hidden_size)
        self.use_bias, self.return_bias = check_flag("bias", bias), bool(said.return_bias)
        self.use_fc1_bias = self.use_bias if said.fc1_bias is None else said.fc1_bias
        self.norm = said.norm(self.hidden_size, eps)
        self.eps = eps
        self.runs_alone = self.checkpoint = bool(said.checkpoint)
        ffn = self.share(self.ffn_hidden_size, "ffn_hidden_size") if said.set_parallel_mode else self.ffn_hidden_size
        self._activation()  # which refuses what it does not take
        self._between = ffn * (2 if widens(said.activation) else 1), ffn
        self._declare(bool(said.set_parallel_mode))
        self.reset_parameters()
        self.relist()
        if plans_ahead(said):
            weight = self.get_parameter("fc1_weight")
            rows = own_rows(self, [said.seq_length, said.micro_batch_size])
            self.plan_ahead(weight.new_empty(*rows, hidden_size, requires_grad=True))

    def _declare(self, is_cut: bool) -> None:
        self.norm.declare(self)
        wide, ffn = self._between
        self.declare("fc1_weight", [wide, self.hidden_size], self.common.fill(), **cut(0, is_cut))
        self._declare_fc1_bias()
        self.declare("fc2_weight", [self.hidden_size, ffn], self.common.fill(output_layer=True), **cut(1, is_cut))
        self.declare("fc2_bias", [self.hidden_size] if self.use_bias else None, 0.0, **self.whole())

    def _declare_fc1_bias(self) -> None:
        shape = [self._between[0]] if self.use_fc1_bias else None
        self.declare("fc1_bias", shape, 0.0, **cut(0, bool(self.common.set_parallel_mode)))

    def _activation(self) -> ops.FusableOperation:
        return activation_op(self.common.activation, self.common.activation_params)

    def variant_ops(self, over: bool = False) -> Iterable[torch.nn.Module]:  # type: ignore[override]
        """The ops of a call; `over`: weights' gradients are written over their main_grad."""
        return map(self.writing_over, self.own_ops()) if over else self._ops()

    def _ops(self) -> Iterator[torch.nn.Module]:
        first, last = ("column", "row") if self.common.set_parallel_mode else (None, None)
        ffn = self.ffn_hidden_size
        wide = ffn * (2 if widens(self.common.activation) else 1)
        yield from self.norm.ops(self, before=first)
        yield ops.Bound(self.product(self.hidden_size, wide, first), self, weight="fc1_weight")
        if self.use_fc1_bias:
            yield ops.Bound(self.bias_op(wide, first), self, bias="fc1_bias")
        yield self._activation()
        yield ops.Bound(self.product(ffn, self.hidden_size, last), self, weight="fc2_weight")
        if self.use_bias and not self.return_bias:
            yield ops.Bound(self.bias_op(self.hidden_size, last), self, bias="fc2_bias")

    @understands
    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **call: Any) -> Asked:
        """Run it: out, then bias and layernorm_out where they are asked for.

        Args:
            inp: [..., hidden_size].
            is_first_microbatch: True overwrites the weights' main_grad, None and False add to it. In a region of FP8
                True quantizes the weights and keeps the result, False reuses it, None quantizes in this call.

        Raises:
            TypeError, ValueError, RuntimeError: for what the preset was not made for, before anything runs.
        """
        self.check_group()
        if is_first_microbatch is None and not call and self.is_list:
            return Asked(self, inp)
        check_call(self, call)
        bias = self.returned(self._parameters.get("fc2_bias"), None) if self.return_bias else None
        return self.answer({}, inp, call, is_first_microbatch, bias)

    @property
    def is_list(self) -> bool:
        return not (self.return_bias or self.checkpoint or self.asked())

    def returned_terms(self) -> tuple[str, ...]:
        is_cut = self.sequence_parallel and self.tp_size > 1
        return ("fc2_bias",) if is_cut and self.return_bias and self.use_bias else ()

    def asked(self) -> tuple[str, ...]:
        return () if self.norm.output is None else (self.norm.output,)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        name, weight = f"{prefix}fc1_bias", state_dict.get(f"{prefix}fc1_weight")
        if name in state_dict and not self.use_fc1_bias and self.common.fc1_bias is None:
            self.use_fc1_bias = True
            self._declare_fc1_bias()
            self.relist()
        elif weight is not None and name not in state_dict and self.use_fc1_bias and not self.use_bias:
            state_dict[name] = weight.new_zeros(self._between[0])
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def to_torch(self) -> torch.nn.Module:
        """torch.nn.Sequential of a norm, two Linears and the activation, over copies of the parameters.

        Raises:
            TypeError: where calls return more than one tensor.
        """
        self.check_one_value("to_torch()")
        held = self._parameters
        norm = self.norm.to_torch(self.get_parameter("layer_norm_weight"), held.get("layer_norm_bias"))
        first = linear_to_torch(self.get_parameter("fc1_weight"), held.get("fc1_bias"))
        second = linear_to_torch(self.get_parameter("fc2_weight"), held.get("fc2_bias"))
        activation = activation_to_torch(self._activation())
        return torch.nn.Sequential(norm, first, activation, second).train(self.training)

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.use_bias}"
