"""Variants: a list with others over the same parameters, of which a call picks one by what its tensors do not say."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch

from te_fuser.flatten import has_own_call
from te_fuser.sequential import Sequential

_KEPT = 16


class Variants(Sequential):
    """List for calls that change a setting: `variant(mask="none")` is another list over the same parameters.

    A setting that is no tensor (a mask's type, a window) selects a variant. To set an op's attribute instead would make
    new plans. A subclass defines `variant_ops(**how)`, the ops of a variant, and its `forward` selects one. A variant
    is made once, keeps its plans, has the training mode and the options of this list, and is in no `state_dict`, copy
    or pickle. A list that contains this one takes this list's own ops, the default variant; hooks on single ops apply
    to it alone. `variant_ops` of a list that contains this one may use `within(mask="none")`.
    """

    def __init__(self, *ops: Any, **options: Any) -> None:
        super().__init__(*ops, **options)
        self._variants: OrderedDict[Hashable, tuple[Sequential, _Modes]] = OrderedDict()
        self._made_from: list[tuple[Mapping[str, torch.nn.Module | None], list[torch.nn.Module | None]]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_variants": OrderedDict(), "_made_from": []}

    def variant_ops(self, **how: Any) -> Iterable[torch.nn.Module]:
        """The ops of a variant: ones of this list, and others bound to its parameters by `ops.Bound`."""
        raise NotImplementedError(f"{type(self).__name__} must define variant_ops(self, **how)")

    def appended(self) -> Iterable[torch.nn.Module]:
        """Modules that stand behind the ops of every variant; by default none."""
        return ()

    def _is_made_from_now(self) -> bool:
        """True where this list and those in it have the members that the variants were made from."""
        made_from = self._made_from
        return bool(made_from) and all([*members.values()] == then for members, then in made_from)

    def variant(self, **how: Hashable) -> Sequential:
        """List for this setting, made once; call, plan and explain it as any list."""
        if not self._is_made_from_now():
            self._variants.clear()
            self._made_from = [
                (m._modules, list(m._modules.values())) for m in self.modules() if isinstance(m, Sequential)
            ]
        key = tuple(how.items())
        found = self._variants.get(key)
        if found is None:
            made = Sequential(*self.variant_ops(**how), *self.appended())
            made.shares_names = self.shares_names
            found = made, _modes(made, self)
            if not torch.compiler.is_compiling():  # compilers cannot keep what they saw being made
                self._variants[key] = found
            while len(self._variants) > _KEPT:
                self._variants.popitem(last=False)
        variant, modes = found
        options = self.options()
        if variant._around != options:
            variant._around.update(options)
        for origin, modules in modes:
            training = (origin or self).training
            if modules[0].training != training:
                for m in modules:
                    m.training = training
        return variant

    def within(self, **how: Hashable) -> Sequential:
        """Variant for use inside of `variant_ops` of a list around this one; it has this list's hooks and options."""
        if has_own_call(self):
            said = ", ".join(f"{name}={value!r}" for name, value in how.items())
            raise TypeError(
                f"{type(self).__name__} has a forward of its own, which the list around does not run in a call of "
                f"another kind ({said}): make it for such calls, hook it, or call it by itself"
            )
        return _Within(self, self.variant(**how))


_Modes = list[tuple[Variants | None, list[torch.nn.Module]]]  # None: the list whose variant it is


def _modes(made: Sequential, root: Variants) -> _Modes:
    """The modules of a variant that are none of the list's own, by the list whose mode they have."""
    own = set(root.modules())
    found: dict[Variants, list[torch.nn.Module]] = {}

    def go(module: torch.nn.Module, origin: Variants) -> None:
        if isinstance(module, _Within):
            origin = module._origin() or origin
        if module not in own:
            found.setdefault(origin, []).append(module)
            for child in module.children():
                go(child, origin)

    go(made, root)
    return [(None if origin is root else origin, modules) for origin, modules in found.items()]


class _Within(Sequential):
    """A variant with the hooks of its origin, which make it a border as they do there."""

    def __init__(self, origin: Variants, variant: Sequential) -> None:
        super().__init__()
        shared = {name: item for name, item in vars(origin).items() if name in _HOOKS}
        vars(self).update(shared, _modules=variant._modules, _given=origin._given)
        self._origin = weakref.ref(origin)
        self.shares_names, self.training = variant.shares_names, variant.training

    @property
    def _is_full_backward_hook(self) -> bool | None:  # type: ignore[override]
        origin = self._origin() if "_origin" in vars(self) else None
        return None if origin is None else origin._is_full_backward_hook

    @_is_full_backward_hook.setter
    def _is_full_backward_hook(self, kind: bool | None) -> None:
        """Ignore the kind: that of the origin counts, which may get hooks later."""


# Where torch.nn.Module keeps those of calls.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
