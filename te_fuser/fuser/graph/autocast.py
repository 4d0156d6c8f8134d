"""torch.autocast as a pass: a Cast op where an op runs in another dtype, and the parameters that it casts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from te_fuser.formula.rows import rounds
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
from te_fuser.ops.autocast import AUTOCAST, cast_to
from te_fuser.ops.base import LoweredOp, Spec, output_specs


def autocast(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list as it runs under autocast."""
    exact = call.x.dtype == torch.float64 and not rounds()  # then every op gives float64, whatever it says
    if call.autocast is None or exact:
        return listed
    flow = _Flow(call, call.autocast)
    return [item for op in listed for item in flow.run(op)]


class _Flow:
    """What is known of the main value and of named ones, from op to op."""

    def __init__(self, call: CallSpecs, target: torch.dtype) -> None:
        self.target, self.x, self.parameters = target, call.x, call.parameters
        self.named = {name: spec for name, (spec, _) in call.named.items()}

    def run(self, item: ListedOp) -> Iterable[ListedOp]:
        """One op, and what comes before it."""
        runs_in = AUTOCAST.of(type(item.lowered.op)).runs_in
        wanted = _dtype_of(runs_in, self.x, self.target)
        if wanted is not None and self.x.dtype != wanted:
            cast = LoweredOp(cast_to(wanted), {})
            yield ListedOp(cast, f"{item.path}.cast", {}, (), stream=item.stream)
            self.x = replace(self.x, dtype=wanted)
        given = {name: self.parameters[b.key].spec.dtype for name, b in item.lowered.bindings.items()}
        yield replace(item, casts=_casts(runs_in, self.x.dtype, given, self.target, wanted))
        self._pass_through(item)

    def _pass_through(self, item: ListedOp) -> None:
        named = {arg: self.named[name] for arg, name in item.names_in.items() if name in self.named}
        try:
            found = output_specs(item.lowered.op, self.x, named)
            outputs = zip(item.names_out, item.lowered.op.named_outputs(), strict=True)
            self.named.update({name: found[own] for name, own in outputs})
        except (ValueError, TypeError, LookupError):
            return  # the graph says which op it is
        self.x = found["output"]


def _dtype_of(runs_in: str | None, x: Spec, target: torch.dtype) -> torch.dtype | None:
    """The dtype that torch.autocast to `target` runs an op in; None where it leaves the op alone."""
    if runs_in in (None, "follow") or x.dtype == torch.float64 or not x.dtype.is_floating_point:
        return None
    if runs_in == "lower":
        return target
    return torch.float32 if x.device.type == "cuda" else None


def _casts(
    runs_in: str | None,
    x: torch.dtype,
    parameters: Mapping[str, torch.dtype],
    target: torch.dtype,
    wanted: torch.dtype | None,
) -> dict[str, torch.dtype]:
    """Name -> dtype of the parameters that are cast for an op, which runs in `x`; it was asked to run in `wanted`."""
    if runs_in == "lower" and x == target:
        return {name: x for name, dtype in parameters.items() if dtype != x}
    if runs_in == "follow" and x == target or runs_in == "float32" and x == wanted:
        return {name: x for name, dtype in parameters.items() if dtype not in (x, torch.float64)}
    return {}
