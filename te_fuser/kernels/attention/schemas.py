"""PyTorch's operators by the schemas that their calls were written for, and whether those still hold."""

from __future__ import annotations

from typing import Any

import torch


def operator_of(schema: str) -> Any:
    """This torch's operator of the schema's name; None where there is none."""
    name = schema.removeprefix("aten::").partition("(")[0]
    found = getattr(torch.ops.aten, name, None)
    return None if found is None else found.default


def why_no_operator(schema: str) -> str | None:
    """Why this torch has no operator that can be called by that schema, or None."""
    operator, name = operator_of(schema), schema.partition("(")[0]
    if operator is None:
        return f"torch {torch.__version__} has no {name}"
    if not fits(operator._schema, torch._C.parse_schema(schema)):
        return f"{name} has changed in torch {torch.__version__}: it is {operator._schema}, known is {schema}"
    return None


def fits(found: Any, known: Any) -> bool:
    """Whether a call written for the schema `known` means the same under `found`; new arguments may have defaults."""

    def described(arguments: Any) -> list[tuple[str, str, bool]]:
        return [(a.name, str(a.type), a.kwarg_only) for a in arguments]

    names = {a.name for a in known.arguments}
    added = [a for a in found.arguments if a.name not in names]
    kept = [a for a in found.arguments if a.name in names]
    return (
        described(kept) == described(known.arguments)
        and all(a.has_default_value() and a.kwarg_only for a in added)
        and [str(r.type) for r in found.returns] == [str(r.type) for r in known.returns]
    )
