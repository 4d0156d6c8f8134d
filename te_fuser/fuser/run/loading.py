"""A plan made an executable: where its kernels come from, their compilation and loading, segments; and its run."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from te_fuser import dtypes
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.config import config
from te_fuser.distributed.dtensor import own_part
from te_fuser.fuser.graph.refs import parameter_ref
from te_fuser.fuser.run.delayed import handed_in
from te_fuser.fuser.run.program import Loaded, Program, Wrapper, build_program, run_program
from te_fuser.fuser.run.segment import Segment, SegmentFunction, build_segments
from te_fuser.fusions.registry import libraries
from te_fuser.params.main_grad import has_main_grad

if TYPE_CHECKING:
    from te_fuser.codegen.cuda_source_kernel import WrittenKernel
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.steps.step import KernelFunction

_LEAST_CAPABILITY = (8, 0)
_PLACES = {"cuda": "GPU", "cpu": "CPU"}  # where kernels might have been generated


def target_for(device: torch.device, dtype: torch.dtype, kernels: str, fallback: str = "warn") -> str:
    """Target that runs row kernels: "cpp" or "cuda" (generated), or "torch" (operations)."""
    if kernels == "reference":
        return "torch"
    why = obstacle(device, dtype)
    # What nobody generates, float64 above all, is no fallback from what a device lacks.
    demanded = kernels == "generated" or (fallback == "error" and dtype in dtypes.GENERATED)
    if why is None and device.type != "cuda":
        return "cpp"
    if why is None:
        for library in libraries():  # which fusions may have to do without
            lacking = library.obstacle(device)
            if lacking is not None and demanded:
                raise RuntimeError(_asked_for(library.kernels, lacking))
            if lacking is not None:
                _warn_once(library.runs_without, lacking)
        return "cuda"
    if demanded:
        raise RuntimeError(_asked_for("generated kernels", why))
    if device.type in _PLACES and dtype in dtypes.GENERATED:
        _warn_once(f"row operations on the {_PLACES[device.type]} by PyTorch's kernels, one for each operation", why)
    return "torch"


def _asked_for(what: str, why: str) -> str:
    return f"{what} were asked for, but {why}; kernels='auto' takes what there is"


def target_on_gpu(dtype: torch.dtype, kernels: str) -> str:
    """Target by which a GPU that is not at hand would run row kernels."""
    if kernels == "generated" and dtype not in dtypes.GENERATED:
        raise RuntimeError(_asked_for("generated kernels", f"{dtype} runs the reference"))
    return "cuda" if kernels != "reference" and dtype in dtypes.GENERATED else "torch"


def missing_notes(target: str, device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Notes on generated kernels that a plan for a device at hand does without."""
    if target == "torch":
        why = obstacle(device, dtype)
        if why is not None:
            yield f"row kernels are not generated: {why}"
    for library in libraries():
        why = library.obstacle(device)
        if why is not None:
            yield f"{library.note_without}: {why}"


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason, if any, for which generated kernels cannot run on a device at hand."""
    if dtype not in dtypes.GENERATED:
        return f"{dtype} runs the reference"
    if device.type == "cuda":
        return _cuda_obstacle(device.index if device.index is not None else torch.cuda.current_device())
    if device.type != "cpu":
        return f"there are no generated kernels for {device.type}"
    from te_fuser.codegen import compiler

    found = compiler.find_compiler(config.compiler)
    return compiler.why_no_compiler(config.compiler) if found is None else None


@functools.cache
def _cuda_obstacle(index: int) -> str | None:
    from te_fuser import _native
    from te_fuser.codegen import nvrtc

    if torch.version.hip is not None:
        return "generated kernels are for NVIDIA GPUs, and this PyTorch is built for AMD's"
    major, minor = torch.cuda.get_device_capability(index)
    who = f"{torch.cuda.get_device_name(index)} has compute capability {major}.{minor}"
    if (major, minor) < _LEAST_CAPABILITY:
        return f"{who}, and generated kernels need 8.0 (Ampere) or newer"
    problem = _native.cuda_driver_refusal()
    if problem is not None:
        return problem
    try:
        version = ".".join(map(str, nvrtc.compiler_version()))
        if major * 10 + minor not in nvrtc.known_architectures():
            return f"{who}, which NVRTC {version} does not compile for; install a newer nvidia-cuda-nvrtc"
    except nvrtc.CompilerMissing as missing:
        return str(missing)
    return None


@functools.cache
def _warn_once(what: str, why: str) -> None:
    warnings.warn(
        f"te_fuser runs {what}, because {why}. "
        "print(model.explain(x)) shows the plan; fallback='error' makes this an error.",
        RuntimeWarning,
        stacklevel=2,
    )


_OFFSETS_PER_CALL = 4  # PyTorch's offsets count in fours
_drawing = threading.Lock()
_apply = super(torch.autograd.Function, SegmentFunction).apply  # the C-level call, without the Python wrapper


@dataclass(frozen=True)
class Executable:
    """A plan with its segments ready to run.

    Attributes:
        function: what a call comes to, where that is one function of input and parameters as they come.
        before: makes parameters of others, among its slots, which are all parameters.
        lying: the numbers of parameters that are DTensors.
    """

    plan: Plan
    segments: tuple[Segment, ...]
    with_grad: bool
    draws: bool
    autocast: bool
    named: tuple[tuple[str, int], ...]
    result: int
    extras: tuple[int, ...]
    function: Callable[..., torch.Tensor] | None = None
    before: Program | None = None
    lying: tuple[int, ...] = ()

    def first(self, promised: Graph) -> Executable:
        """Copy for the first call, which holds what its steps make against `promised`."""
        return replace(self, segments=tuple(replace(s, promised=promised) for s in self.segments), function=None)

    @functools.cached_property
    def alone(self) -> Segment | None:
        """The only segment, if it is the whole call and gives the result alone."""
        if len(self.segments) != 1 or self.extras:
            return None
        (segment,) = self.segments
        everything = tuple(range(len(self.plan.graph.parameters)))
        plan = segment.plan
        fits = plan.values_in == (0,) and plan.values_out == (self.result,) and plan.parameters == everything
        return segment if fits else None


def load(
    plan: Plan,
    outputs: tuple[str, ...] = (),
    *,
    instead: Mapping[str, KernelFunction] | None = None,
    wrap: Wrapper | None = None,
) -> Executable:
    """A plan made ready to run; extra outputs are returned in the order of their names.

    Args:
        instead: description key -> another kernel for it.
        wrap: what runs in each step's place.
    """
    wanted = [g.description for g in plan.generated.values()]
    rows = {key: g.sizes[0] for key, g in plan.generated.items()}
    kernels = load_kernels(wanted, plan.target, plan.x.device, rows, plan.written) | dict(instead or {})
    graph = plan.graph
    given = [graph.output, *(graph.named_outputs[name] for name in outputs)]
    # Where a call gives inputs alone, and none twice: views of these, and nothing runs.
    inputs = {graph.ref(v): v for v in (*graph.named_inputs.values(), 0)}
    handed_on = [inputs[ref] for ref in map(graph.ref, given) if ref in inputs]
    computed = len({*handed_on}) < len(given)
    result, *extras = given if computed else handed_on
    loaded = Loaded(kernels, wrap, [n.label for n in graph.nodes])
    refs = [parameter_ref(k) for k in range(len(graph.parameters))]
    prepared = Executable(
        plan,
        build_segments(plan, loaded) if computed else (),
        bool(plan.backward),
        # Whatever the plan: which random numbers a call takes from PyTorch's generator depends on the ops alone.
        any(n.traits.draws for n in plan.graph.nodes),
        torch.is_autocast_enabled(plan.x.device.type),
        tuple(graph.named_inputs.items()),
        result,
        tuple(extras),
        before=build_program(plan.before, refs, refs, loaded)[0] if computed and plan.before else None,
        lying=tuple([k for k, it in enumerate(graph.lies) if it is not None]),
    )
    return prepared if wrap is not None else replace(prepared, function=_function_of(prepared))


def _function_of(prepared: Executable) -> Callable[..., torch.Tensor] | None:
    """The one function that a call comes to, if any, recorded by autograd where needed."""
    alone = prepared.alone
    does_more = prepared.before is not None or prepared.autocast or prepared.draws
    if does_more or alone is None or alone.aliased != (False,) or alone.unrecorded:
        return None
    if alone.ranks.distributed:
        return None
    (segment,) = prepared.plan.segments
    (step, *more) = segment.forward
    called = None if more or alone.backward is not None else step.task.called(step)
    return called.function if called is not None and called.reads == segment.takes else None


def runs_alike(first: Plan, second: Plan) -> bool:
    """True where two plans of one list run the same calls, of whatever sizes."""
    return _as_run(first) == _as_run(second)


def _as_run(plan: Plan) -> tuple[Any, ...]:
    steps = [(s.name, s.start, s.stop, s.inputs, s.outputs, s.task.identity) for s in plan.steps]
    nodes = [(n.op.kind, n.path, n.draw.stream, n.casts, n.draw.share) for n in plan.graph.nodes]
    values = [(v.spec.dtype, v.gradient_dtype, v.alias_of, v.needs_grad) for v in plan.graph.values]
    return steps, nodes, values, [(s.start, s.stop) for s in plan.segments], measured_schedules(plan)


def measured_schedules(plan: Plan) -> tuple[Any, ...]:
    """The measured schedules of the kernels: of a plan, these alone go by rows."""
    if plan.target != "cuda" or plan.x.device.type != "cuda":
        return ()
    from te_fuser.codegen import cuda_loader

    device, folder = plan.x.device, config.cache_dir
    return tuple(cuda_loader.measured(g.description, device, g.sizes[0], folder) for g in plan.generated.values())


def load_kernels(
    wanted: Sequence[KernelDescription],
    target: str,
    device: torch.device,
    rows: Mapping[str, int] | None = None,
    written: Sequence[WrittenKernel] = (),
) -> dict[str, KernelFunction]:
    """Description key -> kernel, for tensors on `device`.

    Args:
        rows: description key -> about how many rows the kernel will have.
        written: kernels written by hand that are compiled and loaded beside these, where the target is "cuda".
    """
    if target == "cpp":
        from te_fuser.codegen import compiler

        found = compiler.find_compiler(config.compiler)
        loaded = compiler.load(wanted, cache_dir=config.cache_dir, compiler=found)
        return {d.key: k.run for d, k in zip(wanted, loaded, strict=True)}
    if target == "cuda":
        from te_fuser.codegen import cuda_loader

        kernels = cuda_loader.load(wanted, device, rows=rows, cache_dir=config.cache_dir, written=written)
        return {d.key: k.run for d, k in zip(wanted, kernels, strict=True)}
    return {d.key: InterpretedKernel(d) for d in wanted}


def execute(
    prepared: Executable, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Any:
    """Run a prepared plan; parameters in the order of its graph."""
    if not prepared.autocast:
        return _execute(prepared, x, inputs, parameters)
    # The plan has the casts; what runs inside must not cast again.
    with torch.autocast(x.device.type, enabled=False):
        return _execute(prepared, x, inputs, parameters)


def _execute(
    prepared: Executable, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], parameters: Sequence[torch.Tensor]
) -> Any:
    seed = draw_seed(x.device) if prepared.draws else None
    if prepared.before is not None:
        parameters = _with_made(prepared.before, parameters, prepared.lying)
    if prepared.alone is not None:
        return _run(prepared.alone, [x, *parameters], seed)[0]
    values: dict[int, torch.Tensor] = {0: x}
    for name, index in prepared.named:
        values[index] = inputs[name]
    for segment in prepared.segments:
        tensors = [values[v] for v in segment.plan.values_in]
        tensors += [parameters[p] for p in segment.plan.parameters]
        for v in segment.last_read:
            del values[v]
        values.update(zip(segment.plan.values_out, _run(segment, tensors, seed), strict=True))
    made = [values[v] for v in (prepared.result, *prepared.extras)]
    if not prepared.segments:
        made = [t.view_as(t) for t in made]
    return tuple(made) if prepared.extras else made[0]


def _with_made(program: Program, parameters: Sequence[torch.Tensor], lying: Sequence[int]) -> Sequence[torch.Tensor]:
    """The parameters with what is made of others; DTensors stay themselves."""
    slots = program.slots(parameters)
    for k in lying:
        slots[k] = own_part(slots[k])
    run_program(program, slots)
    for k in lying:
        slots[k] = parameters[k]
    return slots[: len(parameters)]


def _run(segment: Segment, tensors: list[torch.Tensor], seed: torch.Tensor | None) -> Sequence[torch.Tensor]:
    if segment.uses_seed:
        tensors.append(seed)  # type: ignore[arg-type]
    if segment.backward is not None:
        late = segment.backward.late
        shown = tensors if late is None else handed_in(tensors, late.weights)
        return _apply(segment, *shown)  # type: ignore[no-any-return]
    given = tensors[: len(segment.plan.values_in)]
    if segment.unrecorded:
        with torch.no_grad():
            return segment.results(segment.run_forward(tensors), given)
    return segment.results(segment.run_forward(tensors), given)


def unhooked(t: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as a leaf without hooks, for measuring; one with a main_grad stays."""
    return t if has_main_grad(t) else t.detach().requires_grad_(t.requires_grad)


def draw_seed(device: torch.device) -> torch.Tensor:
    """(seed, offset) for one call, from the device's generator, which goes on by it.

    So manual_seed, checkpointing, trackers of random states and CUDA-graph replay govern it as they do torch's own
    dropout. On a GPU it lies on the host and costs no kernel; while a graph is captured it is drawn on the device, so
    that each replay draws anew.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(2, dtype=torch.int64, device=device).random_()
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    with _drawing:  # reading and going on are two calls
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + _OFFSETS_PER_CALL)
    signed = seed - (seed >> 63 << 64)  # the same 64 bits, with a sign
    return torch.tensor((signed, offset), device="cpu")  # whatever the default device is
