"""convert: the layers of a model of transformers run by te_fuser, in place, checked on random input; revert."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from te_fuser.compare import distance, in_eval_mode
from te_fuser.convert.layer_ops import become, has_own_forward, keeps_forward
from te_fuser.from_torch import converts, lines_to_write
from te_fuser.fuser.show.measure import undisturbed
from te_fuser.fuser.show.step_rows import and_others
from te_fuser.ops.checks import described, meant, yes_or_no
from te_fuser.params.scales import drop_scales
from te_fuser.sequential import Sequential

if TYPE_CHECKING:
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.show.explain import Explanation

# Module of this package -> the families of transformers whose layers it has.
_FAMILIES_OF = {
    "gpt2": ("gpt2",),
    "llama": ("llama", "mistral"),
    "qwen": ("qwen2", "qwen3"),
    "gemma": ("gemma", "gemma2", "gemma3"),
}
# Module of transformers with a family's layers -> the module of this package.
_FAMILIES = {
    f"transformers.models.{name}.modeling_{name}": f"te_fuser.convert.{module}"
    for module, names in _FAMILIES_OF.items()
    for name in names
}
_OPTIONS = ("check", "memory", "kernels", "fallback", "verify")
_ROWS = (2, 7)  # samples and positions of the check


@dataclass
class Conversion:
    """Result of `convert`; prints as text. `left` says what was not converted, and `explain(ids)` shows the plans.

    Attributes:
        model: the model, converted in place.
        converted: the paths of its layers that run by te_fuser.
        error: largest difference of the output, and of the input gradient, from the original's, relative to the largest
            value of each, on random input; None with check=False.
    """

    model: nn.Module
    converted: tuple[str, ...]
    error: float | None = None
    _refused: dict[str, str] = field(default_factory=dict)

    @property
    def left(self) -> dict[str, str]:
        """Path -> why the module there runs by itself, as it is now: hooks and adapters may come later."""
        found = dict(self._refused)
        for path in self.converted:
            block: Any = dict(self.model.named_modules()).get(path)
            if not hasattr(block, "left"):
                found[path] = "it was reverted" if block is not None else "it is no module of the model any more"
                continue
            found |= {f"{path}.{inner}".strip("."): why for inner, why in block.left().items()}
        return found

    def explain(
        self, *args: Any, device: str | None = None, details: bool = False, source: bool = False, **call: Any
    ) -> Explanation:
        """Plans of the layers in a call of the model: `print(conversion.explain(ids))`. Equal layers are shown once.

        The model runs once; its buffers, a cache that is given and random generators stay as they are.

        Args:
            args, call: what the model is called with.
            device, details, source: as those of `Sequential.explain`.

        Raises:
            TypeError: for other arguments of `Sequential.explain`.
            ValueError: when no layer runs by te_fuser in this call.
        """
        from te_fuser.fuser.show.explain import Explanation

        plans: list[Plan] = []
        borders: list[tuple[int, str]] = []
        for paths, explained in self.explain_layers(args, call, device=device, details=details, source=source):
            borders.append((len(plans), f"In {paths[0]}{and_others(len(paths))}:"))
            borders += [(len(plans) + before, text) for before, text in explained.borders]
            plans += explained.plans
            if explained.unseen:
                borders.append((len(plans), explained.beyond))
        return Explanation(plans, source, (), "", borders, (), details)

    def explain_layers(
        self, args: Sequence[Any], call: Mapping[str, Any], **options: Any
    ) -> list[tuple[list[str], Any]]:
        """Paths of layers that are equal in a call, and the `Explanation` of each such kind: see `explain`."""
        if others := call.keys() & inspect.signature(Sequential.explain).parameters.keys() - {"x", "inputs"}:
            words = f"takes no {', '.join(sorted(others))}; te_fuser.profile(model, ids) measures a converted model"
            raise TypeError(f"explain of a conversion {words}")
        ran: list[tuple[str, Sequential, Any, dict[str, Any]]] = []
        found: dict[str, tuple[list[str], Explanation]] = {}
        with _CopiedTensors():
            own = [v if isinstance(v, torch.Tensor) else copy.deepcopy(v) for v in (*args, *call.values())]
        with undisturbed(self.model, None), _lists_noted(self.model, self.converted, ran):
            self.model(*own[: len(args)], **dict(zip(call, own[len(args) :], strict=True)))
            for path, listed, x, tensors in ran:
                explained = listed.explain(x, **options, **tensors)
                found.setdefault(str(explained), ([], explained))[0].append(path)
        if not found:
            why = "; ".join(f"{path} is left: {why}" for path, why in self.left.items())
            raise ValueError(f"no layer runs by te_fuser in this call; {why or 'the model calls none of them'}")
        return [*found.values()]

    def __str__(self) -> str:
        error = "not checked" if self.error is None else f"{self.error:.1e} from the original"
        lines = [f"{type(self.model).__name__}: {len(self.converted)} layers run by te_fuser, {error}"]
        lines += [f"  {path} is left: {why}" for path, why in self.left.items()]
        return "\n".join(lines)


class _CopiedTensors(TorchFunctionMode):
    """Mode in which copy.deepcopy takes tensors that autograd made, as a cache has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone().requires_grad_()
        return func(*args, **(kwargs or {}))


@contextmanager
def _lists_noted(model: nn.Module, paths: Collection[str], ran: list[Any]) -> Iterator[None]:
    """Context that notes (path, list, x, named tensors) of calls in layers at these paths."""
    blocks = {path: block for path, block in model.named_modules() if path in paths and hasattr(block, "_list")}

    def noting(path: str, block: Any) -> Any:
        def listed(*asked: Any) -> Any:
            found = type(block)._list(block, *asked)

            def run(x: torch.Tensor, **given: Any) -> Any:
                ran.append((path, found, x, given))
                return found(x, **given)

            return run

        return listed

    for path, block in blocks.items():
        block.__dict__["_list"] = noting(path, block)
    try:
        yield
    finally:
        for block in blocks.values():
            del block.__dict__["_list"]


def convert(model: nn.Module, *, check: bool = True, **options: Any) -> Conversion:
    """Make the layers of a transformers model run by te_fuser, in place.

    Takes GPT-2, Llama, Mistral, Qwen2, Qwen3 and Gemma 1 to 3. Modules, names and parameters stay; only the code that
    runs a layer changes, and `revert` undoes it. Parts that cannot be converted run by themselves: `.left` of the
    result lists them with the reasons.

    Args:
        model: the model, or any module that has such layers; other modules in it stay as they are.
        check: compare output and input gradient with the original's, in eval mode, on random input.
        **options: those of the layers' lists: `memory`, `kernels`, `fallback` and `verify` of `Sequential`.

    Raises:
        TypeError: when it is no module, or has no such layer.
        ValueError: when there is nothing to check with: give check=False.
        RuntimeError: when output or gradient differ in the check; the model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a model of transformers, got {described(model)}")
    yes_or_no("convert", "check", check)
    if unknown := next((name for name in options if name not in _OPTIONS), ""):
        raise TypeError(f"convert takes {', '.join(_OPTIONS)}, got {unknown!r}{meant(unknown, _OPTIONS)}")
    Sequential(**options)  # raises for a value that none of them takes
    conversion, new = _swapped(model, options)
    if not conversion.converted and not conversion._refused:
        to_do = "take te_fuser.from_torch(model)" if converts(model) else lines_to_write(model, "model")
        raise TypeError(
            f"convert knows the layers of transformers' GPT-2, Llama, Mistral, Qwen2, Qwen3 and Gemma 1 to 3, and "
            f"{type(model).__name__} has none of them{': ' * bool(to_do)}{to_do}"
        )
    try:
        with torch.inference_mode(False):  # parameters are to be ones that can be trained
            for module in new:
                module.keep_joined()
        if check and conversion.converted:
            conversion.error = _checked(model)
    except Exception:
        for module in new:
            module.restore()
        raise
    return conversion


def revert(model: nn.Module) -> nn.Module:
    """Undo `convert`: the layers run by their own classes again. Returns the model.

    Parameters keep their values; scales of FP8 are dropped.

    Raises:
        TypeError: for no module, and for a layer whose class was changed since, as by FSDP; nothing is reverted then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"revert takes a model that te_fuser.convert has converted, got {described(model)}")
    for module in model.modules():
        kind = _kind_of(type(module))
        if kind is not None and isinstance(module, kind) and type(module) is not kind:
            raise TypeError(
                f"revert: a converted layer is a {type(module).__name__} now: revert it before it gets a class that "
                "stands on its own, as FSDP's does"
            )
    for block in _blocks(model):
        block.restore()
        drop_scales(block)
    return model


def _swapped(model: nn.Module, options: dict[str, Any]) -> tuple[Conversion, list[Any]]:
    """Turn layers into those of te_fuser; gives what became of each, and new ones."""
    converted, refused, new = list[str](), dict[str, str](), list[Any]()
    for path, module in model.named_modules():
        kind = _kind_of(type(module))
        if kind is None:
            continue
        why: str | None
        if type(module) not in (kind.was, kind):
            why = f"it is a {type(module).__name__}, which may compute something else than a {kind.was.__name__}"
        elif has_own_forward(module) and not keeps_forward(module):
            why = "it has a forward of its own"
        else:
            why = kind.why_not(module)
        if why is not None:
            refused[path] = why
            continue
        if type(module) is not kind:
            become(module, kind)
            new.append(module)
        module.__dict__["_te_fuser_options"] = options
        converted.append(path)
    return Conversion(model, tuple(converted), None, refused), new


def _kind_of(kind: type[nn.Module]) -> Any:
    """The class that runs a layer of this class; None where there is none."""
    for ancestor in kind.__mro__:
        family = _FAMILIES.get(ancestor.__module__)
        if family is not None:
            for found in importlib.import_module(family).BLOCKS:
                if found.was is ancestor:
                    return found
    return None


def conversion_of(given: Any) -> Conversion | None:
    """The conversion that was given, or of the model that was, if any."""
    if isinstance(given, nn.Module):
        paths = tuple(path for path, m in given.named_modules() if type(m) is _kind_of(type(m)))
        return Conversion(given, paths) if paths else None
    return given if isinstance(given, Conversion) else None


def _blocks(model: nn.Module) -> list[Any]:
    """The layers that are converted."""
    return [m for m in model.modules() if type(m) is _kind_of(type(m))]


# ------------------------------------------------------------------------------------------------------ the check


def _checked(model: nn.Module) -> float:
    """Largest relative distance of a converted model's results from the original's."""
    stacks = [m for m in model.modules() if any(_blocks(c) for c in m.children() if isinstance(c, nn.ModuleList))]
    stacks = [m for m in stacks if hasattr(m, "get_input_embeddings")]
    if not stacks:
        raise ValueError("convert checks itself on a model with embeddings, and finds none: give check=False")
    worst = 0.0
    for stack in stacks:
        if any(p.is_meta for p in stack.parameters()):
            raise ValueError("convert cannot check a model on the meta device: give check=False")
        with in_eval_mode(stack), torch.inference_mode(False):
            with _as_they_were(stack):
                wanted = _results(stack)
            found = _results(stack, wanted)
        for what, want in wanted.items():
            scale, apart = want.abs().max().item(), distance(found[what], want).largest
            if apart > _allowed(want):
                raise RuntimeError(
                    f"convert: the {what} of {type(stack).__name__} lies {apart:.2e} from the original's, whose "
                    f"largest is {scale:.2e}: one of its modules computes something else than its class does, or not "
                    "the same twice; the model is as it was"
                )
            worst = max(worst, apart / scale if scale else 0.0)
    return worst


def _allowed(want: torch.Tensor) -> float:
    """Distance that rounding may make; float64 models have norms in float32, too."""
    eps: float = max(torch.finfo(t).eps for t in (want.dtype, torch.float32)) ** 0.5
    return eps * max(torch.finfo(want.dtype).tiny, want.abs().max().item())


def _results(stack: Any, wanted: Collection[str] = ()) -> dict[str, torch.Tensor]:
    """Output for random tokens, the embeddings' gradient, and outputs by caches."""
    from te_fuser.convert.call import decoders  # needs transformers

    embed = stack.get_input_embeddings()
    rng = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(embed.weight.shape[0], _ROWS, generator=rng, device="cpu").to(embed.weight.device)
    with torch.autocast(embed.weight.device.type, enabled=False), torch.enable_grad():
        x = embed(tokens).detach().requires_grad_()
        with _parts_copied(stack):
            y = stack(inputs_embeds=x, use_cache=False).last_hidden_state
        dy = torch.randn(y.shape, generator=rng, device="cpu").to(y)
        found = {"output": y.detach(), "input's gradient": torch.autograd.grad(y, x, dy)[0]}
        for name, decode in decoders(stack, x.detach()).items():
            with _parts_copied(stack):
                if name in wanted:
                    found[name] = decode()
                elif not wanted:
                    with suppress(Exception):  # modules of one's own may take no cache
                        if distance(decode(), y.detach()).largest <= _allowed(y.detach()):
                            found[name] = y.detach()
    return found


@contextmanager
def _parts_copied(stack: nn.Module) -> Iterator[None]:
    """Context in which parts without parameters, as rotary embeddings, are copies."""
    before = dict(stack._modules)
    for name, part in before.items():
        if part is not None and next(part.parameters(), None) is None:
            stack._modules[name] = made = copy.copy(part)
            made._buffers = {n: b if b is None else b.clone() for n, b in part._buffers.items()}
    try:
        yield
    finally:
        stack._modules.update(before)


@contextmanager
def _as_they_were(model: nn.Module) -> Iterator[None]:
    """Inside, converted layers run as they did before."""
    blocks = _blocks(model)
    kinds = [type(block) for block in blocks]
    for block in blocks:
        become(block, block.was)
    try:
        yield
    finally:
        for block, kind in zip(blocks, kinds, strict=True):
            become(block, kind)
