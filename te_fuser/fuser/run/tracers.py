"""Who would record a call, or differentiate it forward: they see operations of PyTorch, and a kernel is none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from te_fuser import _native

_C = torch._C
_MODES = _C._TorchDispatchModeKey
REFERENCE = _native.instead  # what runs in our place
_INSTEAD = (
    f"trace a module whose forward is {REFERENCE}, which is plain PyTorch: docs/works-with.md shows one, for "
    "make_fx, torch.jit.trace, torch.export and torch.compile"
)


def refuse_tracers() -> None:
    """Refuse a call that this thread traces.

    Raises:
        TypeError: naming the tracer, and what to trace instead.
    """
    if _C._get_tracing_state() is not None:  # type: ignore[attr-defined]
        raise TypeError(f"te_fuser does not run under torch.jit.trace, which would record no kernel; {_INSTEAD}")
    before = _C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch)  # make_fx(pre_dispatch=True)
    if before or _C._get_dispatch_mode(_MODES.PROXY) is not None:
        raise TypeError(f"te_fuser does not run under make_fx, which would record no kernel; {_INSTEAD}")
    if _C._get_dispatch_mode(_MODES.FAKE) is not None:
        raise TypeError(f"te_fuser does not run under FakeTensorMode, whose tensors have no memory; {_INSTEAD}")


def refuse_proxy(x: Any) -> None:
    """Refuse what torch.fx.symbolic_trace hands in, before anything of the model is looked at.

    Raises:
        TypeError: saying what to do.
    """
    if isinstance(x, torch.fx.Proxy):
        raise TypeError(
            "te_fuser does not run under torch.fx.symbolic_trace, whose proxies have no shape to plan for; make the "
            f"model a leaf (Tracer.is_leaf_module), or give make_fx a function that calls {REFERENCE}"
        )


def refuse_tangents(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a call one of whose tensors has a tangent; asked within a dual level alone.

    Raises:
        TypeError: saying what to differentiate instead.
    """
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise TypeError(
            "te_fuser has no forward-mode derivatives, and the result would have no tangent; differentiate "
            f"{REFERENCE}, which is plain PyTorch, in the forward_ad.dual_level() or by torch.func.jvp"
        )


def in_dual_level() -> bool:
    """Whether tensors may have tangents now."""
    return forward_ad._current_level >= 0
