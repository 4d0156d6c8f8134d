"""The rows of cuBLASLt's: what they say of their products; matmul and matmul_backward in plans, and why not."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.graph.refs import RECOMPUTED
from te_fuser.fusions import cublaslt, cublaslt_masks, cublaslt_sums
from te_fuser.kernels.cublaslt.products import configured
from tests.fusions.products import autocast_on_cuda, covered, plan, reasons


def test_both_directions_on_a_gpu() -> None:
    p = plan(ops.MatMul(4096, 1024))
    assert covered(p.forward) == [("matmul", 0, 1)]
    assert covered(p.backward) == [("matmul_backward", 0, 1)] * 2
    dgrad, wgrad = p.backward
    assert [n for n, _ in dgrad.outputs] == ["input"] and [n for n, _ in wgrad.outputs] == ["0.weight"]
    assert dgrad.chain and not wgrad.chain
    x, w, y = 8192 * 4096 * 2, 4096 * 1024 * 2, 8192 * 1024 * 2
    assert [(s.cost.read, s.cost.written) for s in (*p.forward, dgrad, wgrad)] == [(x + w, y), (y + w, x), (y + x, w)]


def test_only_what_is_needed_runs() -> None:
    model = te_fuser.Sequential(ops.MatMul(64, 64), ops.MatMul(64, 64)).to("meta", torch.bfloat16)
    model[1].weight.requires_grad_(False)
    p = model.plan(torch.empty(16, 64, dtype=torch.bfloat16, device="meta"), device="h200")
    assert [(s.start, [n for n, _ in s.outputs]) for s in p.backward] == [(1, ["input"]), (0, ["0.weight"])]


def test_a_weight_gradient_waits_for_what_is_computed_again() -> None:
    p = plan(ops.LayerNorm(4096), ops.MatMul(4096, 4096), ops.SiLU(), memory="lean")
    names = [s.name for s in p.backward]
    assert names == ["silu_bwd", "matmul_backward", "layer_norm_bwd", "matmul_backward"]
    assert dict(p.backward[-1].inputs)["input"].kind is RECOMPUTED


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": None, "rows": 8}, "cuBLASLt runs on cuda, the input is on cpu"),
        ({"kernels": "reference"}, "this plan is one of PyTorch's operations alone"),
        (
            {"dtype": torch.float64},
            "cuBLASLt's products are in bfloat16, float16 and float32, and this one is in float64",
        ),
    ],
)
def test_reasons(options: dict[str, object], reason: str) -> None:
    p = plan(ops.MatMul(64, 64), features=64, **options)  # type: ignore[arg-type]
    assert reasons(p, "matmul") == reasons(p, "matmul_backward") == {reason}
    assert [s.name for s in p.forward] == ["mat_mul"]


def test_under_autocast_the_weight_is_read_as_it_is_cast() -> None:
    model = te_fuser.Sequential(ops.MatMul(64, 64)).to("meta")
    x = torch.empty(16, 64, device="meta", requires_grad=True)
    with autocast_on_cuda():
        p = model.plan(x, device="h200")
    assert [s.name for s in p.forward] == ["cast_fwd", "cast_parameter", "matmul"]


# ---- the table -----------------------------------------------------------------------------------------------------

ROWS = [row for module in (cublaslt, cublaslt_masks, cublaslt_sums) for row in module._ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_what_its_products_read_and_make(row: cublaslt.ProductRow) -> None:
    """As the native products know it: an output, and then what their epilogues read or write beside it."""
    entry = fusions.get(row.name)
    assert entry.direction == row.direction and entry.doc == row.doc and row.doc.endswith(".")
    kinds = [(row.forward, row.takes, entry.gives)] if row.forward else []
    kinds += [(node.method, ("dy", *node.reads), node.produces) for node in row.backward]
    for kind, reads, makes in kinds:
        product = configured(kind, torch.bfloat16, torch.bfloat16)
        given = len(reads) + len(makes)
        assert given == len(product.arguments), (kind, reads, makes)


def test_what_runs_is_the_product_of_the_matchs_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        p = plan(ops.MatMul(64, 64), features=64, dtype=dtype)
        bodies = [s.task.body.function for s in (*p.forward, *p.backward)]  # type: ignore[union-attr]
        wanted = [configured(kind, dtype, dtype) for kind in ("forward", "dgrad", "wgrad")]
        assert [b.__self__ for b in bodies] == wanted
