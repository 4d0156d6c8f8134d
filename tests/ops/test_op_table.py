"""Rows by class: a class's own, its nearest base's, else the default; classes that PyTorch makes have the op's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from te_fuser import ops
from te_fuser.ops.op_table import OpTable
from tests.refused import raises


class Base(ops.RowOp):
    """An op with a row."""


class Heir(Base):
    """One that has its base's."""


class Other(ops.RowOp):
    """One without."""


def test_rows_by_class() -> None:
    table: OpTable[float | None] = OpTable("test_rows_by_class", 1.0)
    assert [table.of(kind) for kind in (Base, Heir, Other)] == [1.0] * 3
    assert table.row(2.0)(Base) is Base
    assert [table.of(kind) for kind in (Base, Heir, Other)] == [2.0, 2.0, 1.0]
    table.add(None, Heir, Other)
    assert [table.of(kind) for kind in (Base, Heir, Other)] == [2.0, None, None]
    assert OpTable("another", 0.0).of(Base) == 0.0
    alone = OpTable("test_rows_of_one_class_alone", 1.0, inherited=False)
    alone.add(2.0, Base, ops.MatMul)
    assert [alone.of(kind) for kind in (Base, Heir, Other)] == [2.0, 1.0, 1.0]
    op = ops.MatMul(3, 5)
    parametrize.register_parametrization(op, "weight", torch.nn.Identity())
    table.add(2.0, ops.MatMul)
    assert type(op) is not ops.MatMul and table.of(type(op)) == alone.of(ops.MatMul) == 2.0


@pytest.mark.parametrize("other", [torch.nn.Linear, Base(), lambda: None])
def test_rows_of_other_classes_are_refused(other: Any) -> None:
    raises(TypeError, "a row of refused is of a class of ops, got", lambda: OpTable("refused", 1.0).row(2.0)(other))
