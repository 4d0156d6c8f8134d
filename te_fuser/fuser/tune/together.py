"""Ranks that tune a list together: the first one decides, what one of them refuses all do, one writes for each disk."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_fuser.codegen.entry_file import tuned_folder
from te_fuser.distributed import telling
from te_fuser.kernels.trials import Deciding

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group


@dataclass(frozen=True)
class Together:
    """Those of the groups that run ops of a list; without any, this process asks nobody."""

    groups: tuple[Group, ...] = ()

    def first(self, what: str, value: Any) -> Any:
        """What the first rank found; of this one it is not looked at."""
        return telling.of_first(self.groups, f"tune: {what}", value)

    def reason(self, what: str, reason: str) -> str:
        """Why one of them cannot take what is tried, of the first that cannot; empty when all can."""
        found = telling.of_all(self.groups, f"tune: {what}", reason)
        rank = next((k for k, said in enumerate(found) if said), 0)
        return found[rank] if len(set(found)) == 1 else f"on rank {rank}: {found[rank]}"

    def all(self, what: str, holds: bool) -> bool:
        """Whether it holds on all of them."""
        return all(telling.of_all(self.groups, f"tune: {what}", holds))

    def meet(self, what: str) -> None:
        """Go on when all are here."""
        telling.of_all(self.groups, f"tune: {what}", None)

    def deciding(self) -> Deciding:
        """The same for what knows of no ranks. Of those that have one folder on one machine the first writes."""
        own = [socket.gethostname(), str(tuned_folder()), os.getpid()]
        found = telling.of_all(self.groups, "tune: where measured choices lie", own)
        writer = next(place for place in found if place[:2] == own[:2])
        return Deciding(self.first, writer == own)
