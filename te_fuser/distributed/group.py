"""Group: the ranks that an op exchanges tensors with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group

_FEW = 8  # ranks that a title names


@dataclass(frozen=True)
class Group:
    """Ranks of torch.distributed, as an op knows them; without arguments, this process alone.

    It holds a name and no ProcessGroup, which can neither be copied nor pickled: a copy stands for the same ranks, and
    what was pickled for the group of that name where it is loaded.

    Attributes:
        name: under which torch.distributed knows the group; empty for this process alone.
        size: how many ranks there are.
        label: the name of the mesh's dimension that it is, where it is one.
    """

    name: str = ""
    size: int = 1
    label: str = ""

    @classmethod
    def of(cls, op: str, given: Any) -> Group:
        """Group from an op's argument: a `Group`, a ProcessGroup, or a DeviceMesh of one dimension.

        Raises:
            TypeError: for anything else.
            ValueError: for a mesh of several dimensions, and for ranks that this process is not among.
        """
        if isinstance(given, Group):
            return given
        mesh = given if isinstance(given, DeviceMesh) else None
        if mesh is not None and mesh.ndim != 1:
            name = (mesh.mesh_dim_names or ("name",))[-1]
            raise ValueError(
                f"{op} takes one dimension of a mesh, got a mesh of {mesh.ndim}: give mesh[{name!r}], one of its "
                "mesh_dim_names"
            )
        if given is torch.distributed.GroupMember.NON_GROUP_MEMBER or (mesh and mesh.get_coordinate() is None):
            raise ValueError(f"{op}: this process is not in the group: make the op in the ranks of the group alone")
        if mesh is not None:
            given = mesh.get_group()
        if not isinstance(given, torch.distributed.ProcessGroup):
            raise TypeError(
                f"{op} takes a group of ranks, got {given!r}: give mesh['tp'] of a DeviceMesh, or a group that "
                "torch.distributed.new_group(ranks) made"
            )
        label = mesh.mesh_dim_names[0] if mesh and mesh.mesh_dim_names else ""
        made = cls(given.group_name, given.size(), label)
        if made.size > 1:
            _given.setdefault(made.name, made)
        return made

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        return 0 if self.size == 1 else torch.distributed.get_rank(self.process_group())

    def process_group(self) -> torch.distributed.ProcessGroup:
        """ProcessGroup that torch.distributed knows by the name."""
        found = self._known()
        if found is None:
            raise RuntimeError(
                f"torch.distributed knows no group {self.name!r} of {self.size} ranks in this process: call "
                "init_process_group() and make the group first, or give the op another group"
            )
        return found

    def is_here(self) -> bool:
        """True where torch.distributed knows it in this process."""
        return self._known() is not None

    def _known(self) -> torch.distributed.ProcessGroup | None:
        try:
            return _resolve_process_group(self.name)  # type: ignore[arg-type]
        except RuntimeError:
            return None

    def __str__(self) -> str:
        """Text for messages: the rank of how many, in which group."""
        known = self.size == 1 or self._known() is not None
        at = f"rank {self.rank} of {self.size}" if known else f"one of {self.size} ranks"
        return f"{at} ({self.title})"

    @property
    def title(self) -> str:
        """Name in messages and plans: the label or dimension of a mesh, else its ranks."""
        if self.label or not self.name:
            return self.label or "this process"
        found = self._known()
        if found is None:
            return self.name
        if found is torch.distributed.group.WORLD:
            return "world"
        ranks = torch.distributed.get_process_group_ranks(found)
        listed = [*ranks[:_FEW], "..", ranks[-1]] if len(ranks) > _FEW + 1 else ranks
        return f"[{', '.join(map(str, listed))}]"


_given: dict[str, Group] = {}  # by name, those of several ranks


def groups_given() -> tuple[Group, ...]:
    """Groups of several ranks that ops of this process were given."""
    return tuple(group for group in _given.values() if group.is_here())


class OfRanks:
    """Base of objects with a group of ranks, this process alone at first; set it to anything that `Group.of` takes."""

    _group: Group = Group()

    @property
    def group(self) -> Group:
        return self._group

    @group.setter
    def group(self, group: Any) -> None:
        self._group = Group.of(type(self).__name__, group)


def has_ranks() -> bool:
    """True where other processes run with this one."""
    return dist.is_initialized() and dist.get_world_size() > 1
