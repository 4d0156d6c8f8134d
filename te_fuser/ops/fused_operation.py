"""FusedOperation: stands for several consecutive ops, so that patterns can take these by one name."""

from __future__ import annotations

from dataclasses import replace

from te_fuser.facts import Facts
from te_fuser.ops.base import FusableOperation, LoweredOp, Place, Spec, Whole, output_specs
from te_fuser.ops.hooks import facts_of_parts, refuse_hooks


class FusedOperation(FusableOperation):
    """Stands for several consecutive ops, so that fusions can take exactly these by one name.

    Give the ops by name, in their order: `super().__init__(up=ops.Linear(8, 16), gate=ops.SwiGLU())`. In a list it is
    lowered to them, and means and trains what they do. A pattern that names its class fits where one such operation
    stands, and covers all its elementary ops (`m[0]`, `m[1]`, ...); elsewhere the same ops in a row do not fit it.

    Raises:
        TypeError: when a part is no op; or, when it is used, has hooks, which would not run.
        ValueError: without any part.
    """

    family = True

    def __init__(self, **parts: FusableOperation) -> None:
        super().__init__()
        if not parts:
            raise ValueError(f"{type(self).__name__} stands for no op at all; give it some, by name and in order")
        for name, part in parts.items():
            if not isinstance(part, FusableOperation):
                got = type(part).__name__
                raise TypeError(f"{type(self).__name__}: part {name!r} is a {got}; a fused operation stands for ops")
            self.add_module(name, part)

    def parts(self) -> dict[str, FusableOperation]:
        """The ops it stands for, by name."""
        return {name: part for name, part in self._modules.items() if isinstance(part, FusableOperation)}

    def facts(self) -> Facts:
        return Facts.of([super().facts(), facts_of_parts(self)])

    def lower(self) -> list[LoweredOp]:
        for name, part in self.parts().items():
            refuse_hooks(self, name, part)
        found = [replace(low, suffix=f".{n}{low.suffix}") for n, part in self.parts().items() for low in part.lower()]
        whole = Whole(self.kind)
        return [replace(low, places=(Place(whole, k, len(found)), *low.places)) for k, low in enumerate(found)]

    def infer(self, x: Spec) -> Spec:
        for part in self.parts().values():
            x = output_specs(part, x)["output"]
        return x
