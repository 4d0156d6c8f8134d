"""Comparison of the results of what tune tries with the default's: the rule of verify, without float64.

Outputs and gradients may differ by four times what the default's own differ by when its data are moved by an ulp, plus
one ulp of their scale. The default runs on moved data only where one run does not settle it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from te_fuser.compare import judge_alike, neighbour
from te_fuser.distributed.consistency import gather_values
from te_fuser.distributed.dtensor import is_dtensor, like_dtensor, own_part
from te_fuser.fuser.run.loading import Executable, execute
from te_fuser.params.main_grad import caught, has_main_grad

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.plan.plan import Plan

Results = dict[str, torch.Tensor]
_AS_IT_IS = contextlib.nullcontext()


def reason_of_any(groups: Sequence[Group], what: str, reason: str) -> str:
    """Reason of the first rank of these groups that cannot take what is tried; empty where all can."""
    found = gather_values(groups, f"tune: {what}", reason)
    rank = next((k for k, said in enumerate(found) if said), 0)
    return found[rank] if len(set(found)) == 1 else f"on rank {rank}: {found[rank]}"


class Check:
    """The results of the default for one call, and what others must give; sets PyTorch's seed."""

    def __init__(
        self,
        default: Executable,
        x: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        parameters: Sequence[torch.Tensor],
        groups: Sequence[Group] = (),
    ) -> None:
        self.groups = groups
        self.default, self.x, self.inputs, self.parameters = default, x, inputs, parameters
        self.coarsest = default.plan.graph.coarsest
        self.wanted = self.results(default)

    def reason(self, other: Executable, within: AbstractContextManager[None] = _AS_IT_IS) -> str:
        """Reason, of any rank, for which another plan of the call or other kernels cannot be taken; empty if they can.

        `within` is a context for the other one alone, as of other algorithms.
        """
        reason, found = "", Results()
        try:
            with within:
                found = self.results(other)
        except Exception as error:  # of a fusion that no plan has run yet: whatever it may raise
            reason = f"fails: {type(error).__name__}: {error}"
        reason = reason_of_any(self.groups, "what is tried has run", reason)
        if reason or _drawn_elsewhere(self.default.plan, other.plan):
            return reason
        try:
            title, whose = "differs from the default", "the default"
            rows = judge_alike(title, found, self.wanted, self._neighbour, whose, self._settled)
            failed = [row for row in rows if not row.passed]
            reason = str(max(failed, key=lambda row: row.share)) if failed else ""
        except torch.OutOfMemoryError:
            reason = "there is no memory to compare it with the default on moved data"
        return reason_of_any(self.groups, "results are compared", reason)

    def _settled(self, settled: bool) -> bool:
        """True where no rank has to look at moved data, which all run together."""
        return all(gather_values(self.groups, "tune: whether to run on moved data", settled))

    def note(self, other: Executable) -> str:
        """Parts of another plan that could not be compared, in words; empty where all could."""
        drawing = _drawn_elsewhere(self.default.plan, other.plan)
        return f"not compared: {', '.join(drawing)} draws other numbers by another kernel" if drawing else ""

    def results(self, prepared: Executable) -> Results:
        """Outputs and gradients by name."""
        return self._results(prepared, self.x, self.inputs, self.parameters)

    def _neighbour(self, number: int) -> Results:
        """The default's results on data moved by an ulp."""
        # What has a main_grad is known by the tensor itself, and stays.
        moving = {f"{k}": p for k, p in enumerate(self.parameters) if not has_main_grad(p)}
        given = {"x": self.x, **{f"input {name}": t for name, t in self.inputs.items()}, **moving}
        moved = neighbour({name: own_part(t.detach()) for name, t in given.items()}, number, self.coarsest)
        for name, t in given.items():  # of DTensors each rank's own part was moved
            whole = like_dtensor(moved[name], t) if is_dtensor(t) else moved[name]
            moved[name] = whole.requires_grad_(t.requires_grad)
        inputs = {name: moved[f"input {name}"] for name in self.inputs}
        parameters = [moved.get(f"{k}", p) for k, p in enumerate(self.parameters)]
        return self._results(self.default, moved["x"], inputs, parameters, number)

    def _results(
        self,
        prepared: Executable,
        x: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        parameters: Sequence[torch.Tensor],
        moved: int | None = None,
    ) -> Results:
        """Outputs and gradients; `moved`: the neighbour of arriving gradients."""
        torch.default_generator.manual_seed(0)  # torch.manual_seed is for all devices
        if x.device.type == "cuda":
            torch.cuda.default_generators[x.device.index or 0].manual_seed(0)
        graph = prepared.plan.graph
        # Parameters as errors call them: by the first op that reads them.
        called = {k: f"{name} of {n.label}" for n in reversed(graph.nodes) for name, k in n.parameters.items()}
        names = [called.get(k, f"parameter {k}") for k in range(len(graph.parameters))]
        with contextlib.ExitStack() as stack:
            added = {k: stack.enter_context(caught(p)) for k, p in enumerate(parameters) if p.requires_grad}
            result = execute(prepared, x, inputs, parameters)
            made = result if isinstance(result, tuple) else (result,)
            found = {f"output {k}" if k else "output": t.detach() for k, t in enumerate(made)}
            if not prepared.with_grad:
                return found
            named = {f"input {name!r}": t for name, t in inputs.items()}
            leaves = {"input": x, **named, **dict(zip(names, parameters, strict=True))}
            leaves = {f"gradient of {name}": t for name, t in leaves.items() if t.requires_grad}
            ends = [t for t in made if t.requires_grad]
            arriving = {}
            for k, t in enumerate(ends):  # the same normal numbers each time
                rng = torch.Generator(t.device).manual_seed(k + 1)
                arriving[f"{k}"] = torch.randn(t.shape, generator=rng, device=t.device, dtype=t.dtype)
            if moved is not None:  # a bias's gradient depends on nothing else
                arriving = neighbour(arriving, moved, self.coarsest)
            gradients = torch.autograd.grad(ends, list(leaves.values()), list(arriving.values()), allow_unused=True)
        for (name, leaf), g in zip(leaves.items(), gradients, strict=True):
            found[name] = torch.zeros_like(own_part(leaf)) if g is None else own_part(g)
        for k, t in added.items():
            if t is not None:
                name = f"gradient of {names[k]}"
                found[name] = found[name] + t.to(found[name].dtype)
        return found


def _drawn_elsewhere(plan: Plan, other: Plan) -> list[str]:
    """The ops that draw by themselves, as attention does, by other kernels in the other plan."""
    apart = [n for n in plan.graph.nodes if n.traits.draws and not n.traits.is_row]
    return [n.label for n in apart if _runs(plan, n.index) != _runs(other, n.index)]


def _runs(plan: Plan, op: int) -> list[str]:
    return [s.name for s in plan.forward if s.start <= op < s.stop]
