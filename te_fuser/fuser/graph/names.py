"""The names in a list: what ops bind and read, and what callers give and ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_fuser.fuser.graph.checks import plain
from te_fuser.ops import op_table
from te_fuser.ops.row_op import RowOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from te_fuser.fuser.graph.listed import CallSpecs, ListedOp
    from te_fuser.ops.base import FusableOperation


class Names:
    """The values that names stand for, while a list is gone through.

    Attributes:
        inputs: the named inputs of the call that ops read.
    """

    def __init__(self, listed: Sequence[ListedOp], lowered: Sequence[ListedOp], call: CallSpecs) -> None:
        self.inputs: dict[str, int] = {}
        self._listed, self._lowered, self._call = listed, lowered, call
        self._bound: dict[str, int] = {}
        self._opened: dict[str, str] = {}  # name -> the op that opened it
        self._read: set[str] = set()  # of the names that are open
        self._exported: dict[str, list[tuple[str, int]]] = {}

    def bind(self, label: str, name: str, op: FusableOperation, value: int) -> None:
        """From here on a name stands for what an op gives.

        Raises:
            ValueError: when somebody opened it before, and nobody read it yet.
        """
        if op_table.exports.of(type(op)):
            self._exported.setdefault(name, []).append((label, value))
            return
        if name in self._opened and name not in self._read:
            raise ValueError(f"{label} opens {plain(name)!r}, which {self._opened[name]} opened and nobody closed yet")
        self._read.discard(name)
        self._bound[name] = value
        if op_table.may_stay_unread.of(type(op))(op):
            self._opened.pop(name, None)
        else:
            self._opened[name] = label

    def read(self, name: str) -> int | None:
        """What an op reads by this name; None where no op before it binds it."""
        if name not in self._bound:
            return None
        self._read.add(name)
        return self._bound[name]

    def exported(self, name: str) -> int:
        """What a caller gets who asks for this output.

        Raises:
            ValueError: when there is none, or several.
        """
        close = [n for n in self._exported if plain(n) == name]
        found = self._exported.get(name) or (self._exported[close[0]] if len(close) == 1 else [])
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(label for label, _ in found)} both give {plain(name)!r}; rename one of them"
            )
        if found:
            return found[0][1]
        if name in self._bound:
            return self._bound[name]
        known = ", ".join(sorted(self._exported)) or "none"
        raise ValueError(
            f"no Output({name!r}) in the list (outputs: {known})" + (": name one by its path" if close else "")
        )

    def check(self) -> None:
        """Refuse, at the end of a list, what nobody read.

        Raises:
            ValueError: for a name that an op opened.
            TypeError: for a named input of the call.
        """
        for name, label in self._opened.items():
            # An op that runs alone opens nothing for others.
            if name not in self._read and name not in self._call.outputs and len(self._lowered) > 1:
                raise ValueError(
                    f"{label} opens {plain(name)!r}, but no Add({plain(name)!r}) after it closes it; "
                    "add one, or use Output to hand the value to the caller"
                )
        unknown = sorted(set(self._call.named) - set(self.inputs) - self._readable())
        if unknown:
            takes = ", ".join(sorted(self._readable())) or "none"
            raise TypeError(f"unknown input {unknown[0]!r}: no op of this list reads it (named inputs: {takes})")

    def missing(self, label: str, name: str, reader: ListedOp) -> str:
        """The error for a name that an op reads and nobody gives."""
        op = reader.lowered.op
        hint = give = f"pass it: model(x, {plain(name)}=...)"
        binds = [o for o in self._lowered if plain(name) in map(plain, o.names_out)]
        for o in [o for o in binds if not op_table.exports.of(type(o.lowered.op))]:
            if f"{reader.scope}.".startswith(o.scope and f"{o.scope}."):
                hint = f"{o.path!r}, a later op, binds it: move that before its use"
            else:
                hint = f"{o.path!r} binds it for its own list, {o.scope!r}, alone: put both into one list, or {give}"
        given = ", ".join(sorted(self._call.named)) or "none"
        what = f"{label} reads {plain(name)!r}, which no Fork before it binds and the call does not give"
        forgotten = [p for p in op._parameters if isinstance(op, RowOp) and p not in op.arguments()]
        mistaken = f"; parameters that compute() does not take: {', '.join(forgotten)}" if forgotten else ""
        return f"{what} ({hint}; given: {given}{mistaken})"

    def _readable(self) -> set[str]:
        # Also by an op that does nothing in this call, as another list may give it for what stands behind this one.
        return {name for o in self._listed for name in o.names_in.values() if "/" not in name}
