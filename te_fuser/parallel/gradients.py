"""Gradients of weights on several ranks: sums left to a training engine, and products that write into DDP's buckets."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from te_fuser.distributed.dtensor import is_dtensor
from te_fuser.flatten import flatten
from te_fuser.fused_regions import Border
from te_fuser.fuser.graph.list_passes import with_placements
from te_fuser.fuser.graph.op_instances import ListedOp
from te_fuser.ops import MatMul
from te_fuser.params.binding import GivenBinding
from te_fuser.params.gradient_sums import LEFT
from te_fuser.params.main_grad import BUCKET, IN_BUCKET, BucketMark, BucketPlace
from te_fuser.presets.base import Preset
from te_fuser.sequential import Sequential


def leave_sums_to_engine(model: torch.nn.Module) -> list[str]:
    """Leave sums of gradients over the ranks to the training engine: sets `parameter.sequence_parallel = True`.

    For norms and biases on sharded sequences, and norms of sharded heads. te_fuser then no longer sums their gradients;
    an engine such as Megatron does, once a step, by these marks. Presets keep the marks when they are moved, copied or
    loaded; other modules lose them when a parameter is replaced.

    Returns:
        The parameters' names.

    Raises:
        ValueError: where an op of a list cannot take what ranks have.
    """
    items = [item for listed in lists_of(model) for item in with_placements(listed)]
    summed = [item.lowered.bindings[name] for item in items for name in item.summed]
    marked = {id(part) for b in summed if not isinstance(b, GivenBinding) for part in b.parts()}
    presets = [module for module in model.modules() if isinstance(module, Preset)]
    marked |= {id(preset.get_parameter(name)) for preset in presets for name in preset.returned_terms()}
    found = []
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in marked:
                found.append(f"{path}.{name}" if path else name)
                if isinstance(module, Preset):
                    module.mark(name, **{LEFT: True})
                setattr(parameter, LEFT, True)
    return found


def lists_of(module: torch.nn.Module) -> Iterator[tuple[ListedOp, ...]]:
    """The lists of ops that are planned together in a model."""
    if not isinstance(module, Sequential):
        for child in module.children():
            yield from lists_of(child)
        return
    for part in flatten(module):
        if not isinstance(part, Border):
            yield part.listed
        elif part.module is not module:
            yield from lists_of(part.module)


class _Buckets:
    """State of a communication hook.

    Attributes:
        group: the ranks that average; copies have none, since no one calls a hook of copies.
        places: those of gradients, which weights refer to weakly.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.places: list[BucketPlace] = []

    def __reduce__(self) -> tuple[type["_Buckets"], tuple[()]]:
        return _Buckets, ()


def write_into_buckets(model: DistributedDataParallel) -> list[str]:
    """Have products write weight gradients into the buckets of DistributedDataParallel, which averages them in place.

    Without it PyTorch multiplies each gradient by 1 / ranks into its bucket: a pass over memory that this saves. A
    weight whose `grad` is not None, as that of a second micro-batch in `no_sync`, gets its gradient added as ever.

    It registers a communication hook: call it once, before the first forward, and register no other. As with any such
    hook, gradients are averaged over all ranks in `join(divide_by_initial_world_size=False)`, too. Copies of the model,
    weights that are replaced, and weights with tensor hooks (`register_hook`) get gradients in memory of their own.

    Args:
        model: one with `gradient_as_bucket_view=True`.

    Returns:
        The names of the weights, as `model.module` has them: those of `ops.MatMul` that have one parameter for a
        weight, and neither `accumulate_into_main_grad` nor `delay_wgrad_compute`.

    Raises:
        TypeError: when `model` is no DistributedDataParallel.
        ValueError: without `gradient_as_bucket_view=True`, or when no weight can be written so.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"write_into_buckets takes a DistributedDataParallel, got {type(model).__name__}")
    if not model.gradient_as_bucket_view:
        raise ValueError(
            "write_into_buckets: gradients are to stay in buckets; make the model by "
            "DistributedDataParallel(..., gradient_as_bucket_view=True)"
        )
    names = {p: name for name, p in model.module.named_parameters()}
    found: dict[torch.Tensor, list[MatMul]] = {}
    for item in [item for listed in lists_of(model.module) for item in listed]:
        op = item.lowered.op
        if not isinstance(op, MatMul) or op.delay_wgrad_compute:
            continue
        if not op.accumulate_into_main_grad or op.overwrite_main_grad == IN_BUCKET:
            weight, *others = item.lowered.bindings["weight"].parts()
            if not others and weight in names and weight.requires_grad and not is_dtensor(weight):
                found.setdefault(weight, []).append(op)
    if not found:
        raise ValueError("write_into_buckets: no op of the model multiplies with a parameter of its own")
    buckets = _Buckets(model.process_group)
    model.register_comm_hook(buckets, _average)
    for weight, products in found.items():
        buckets.places.append(BucketPlace(weight))
        setattr(weight, BUCKET, BucketMark(buckets.places[-1]))
        for op in products:
            op.accumulate_into_main_grad, op.overwrite_main_grad = True, IN_BUCKET
    return [names[weight] for weight in found]


def _average(buckets: _Buckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket over the ranks, in place, and note where its weights have their gradients."""
    for weight, view in zip(bucket.parameters(), bucket.gradients(), strict=True):
        place = getattr(weight, BUCKET, BucketMark()).place()
        if place is not None:
            place.view = view
    flat, group = bucket.buffer(), buckets.group
    assert group is not None
    averages = group._get_backend(flat.device).name() == "nccl"
    if not averages:
        flat.div_(group.size())
    how = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    work = dist.all_reduce(flat, how, group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])
