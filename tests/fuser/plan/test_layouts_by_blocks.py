"""Values that a generated kernel stores and a product reads by blocks: plans choose it, and no result changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions.match import Match
from te_fuser.recipe import Float8BlockScaling, Format, QParams, Recipe
from tests.fusions.emulated_gpu import on_an_emulated_gpu as on_an_emulated_gpu
from tests.kernels.packed_cases import ATTENTION
from tests.needs import needs_compiler

IN, WIDE, ROWS = 128, 256, 132
BLOCKS = Float8BlockScaling()
BOTH = ("blocks", "transposed_blocks")


def mlp(act: type[Any] = ops.GELU, residual: bool = False, **options: Any) -> te_fuser.Sequential:
    """A norm, two products with their biases, and what is between them; what comes in may be added."""
    width = 2 * WIDE if act is ops.SwiGLU else WIDE
    first = [te_fuser.ops.LayerNorm(IN), ops.MatMul(IN, width), ops.Bias(width), act()]
    parts = *first, ops.MatMul(WIDE, IN), ops.Bias(IN)
    return te_fuser.Sequential(*([te_fuser.Residual(*parts)] if residual else parts), **options)


def planned(
    recipe: Recipe = BLOCKS,
    act: type[Any] = ops.GELU,
    rows: int = ROWS,
    device: str = "h200",
    grad: bool = True,
    frozen: tuple[str, ...] = (),
    **options: Any,
) -> Plan:
    model = mlp(act, **options).to(torch.bfloat16).to_empty(device="meta")
    for name, p in model.named_parameters():
        p.requires_grad_(grad and name not in frozen)
    x = torch.empty(rows, IN, dtype=torch.bfloat16, device="meta", requires_grad=grad)
    with te_fuser.autocast(recipe=recipe), torch.set_grad_enabled(grad):
        return model.plan(x, device=device)


def forms(steps: tuple[Step, ...]) -> list[tuple[str, str]]:
    """(step, what it takes by blocks)."""
    return [(s.name, name) for s in steps for name, ref in s.inputs if ref.form.layout in BOTH]


def test_taken() -> None:
    """GELU, its slope, what a bias sums: kernels store 8 bits twice, nobody launches `quantize_blocks` for them."""
    p = planned()
    assert forms(p.forward) == [("own_scales_matmul_bias", f"input.{layout}") for layout in BOTH]
    assert forms(p.backward) == [
        (name, f"dy.{layout}") for name in ("own_scales_matmul_bias", "own_scales_matmul") for layout in BOTH
    ]
    forward, *backward = [next(s for s in steps if forms((s,))) for steps in (p.forward, p.backward, p.backward[::-1])]
    assert [k.name for k in forward.task.written] == ["quantize_blocks"]  # of the weight
    assert not any(s.task.written for s in backward)
    gelu, slope = (next(s for s in steps if "gelu" in s.name) for steps in (p.forward, p.backward))
    rows, turned = ROWS * WIDE + 4 * 2 * ROWS, WIDE * 144 + 4 * 2 * WIDE
    assert gelu.cost.written == rows + turned
    assert [ref.layout for ref in slope.task.outputs[:2]] == list(BOTH)
    with fusions.disabled(fusions.BY_BLOCKS):
        apart = planned()
    assert not forms(apart.steps) and apart.seconds() > p.seconds()
    assert apart.kept_bytes() == p.kept_bytes()


def test_gated_units_have_blocks_of_both_halves() -> None:
    p = planned(act=ops.SwiGLU)
    assert (len(forms(p.forward)), len(forms(p.backward))) == (2, 4)


def test_what_a_bias_passes_on_is_read_once() -> None:
    """Its gradient is the same tensor by another name: one kernel adds it up and quantizes it."""
    p = planned()
    bias = next(s for s in p.backward if s.name == "bias_bwd")
    assert [o.layout for o in bias.task.outputs] == [*BOTH, "rows"] and not bias.task.aliases
    assert bias.cost.read == ROWS * IN * 2
    none_summed = planned(frozen=("5.bias",))
    assert len(forms(none_summed.backward)) == 2
    added = planned(residual=True)
    bias = next(s for s in added.backward if s.name == "bias_add_bwd")
    assert len(bias.task.outputs) == 3 and len(bias.task.aliases) == 1  # what is added has its gradient by rows


def test_backward_computes_nothing_again_that_a_product_has_saved() -> None:
    p = planned()
    assert not [r.label(p.graph) for s in p.backward for r in s.writes() if r.kind.name == "value again"]


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 130},
        {"recipe": Float8BlockScaling(fp8_format=Format.E4M3, fp8_quant_fwd_inp=QParams(power_2_scale=False),
                                      fp8_quant_bwd_grad=QParams(power_2_scale=False))},
        {"device": "b200"},
        {"kernels": "reference"},
    ],
)  # fmt: skip
def test_what_is_quantized_apart(options: dict[str, Any]) -> None:
    """Rows that products do not take as they come, scales of another kind, and where nothing takes blocks."""
    assert not forms(planned(**options).steps)


def test_without_gradients_only_rows() -> None:
    p = planned(grad=False)
    assert forms(p.forward) == [("own_scales_matmul_bias_alone", "input.blocks")]


@pytest.mark.parametrize("weight", ["1.weight", "4.weight"])
def test_a_gradient_is_handed_over_where_both_products_read_it(weight: str) -> None:
    p = planned(frozen=(weight,))
    assert forms(p.forward) and len(forms(p.backward)) == 2


def test_no_segment_ends_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    p = planned()
    assert (len(forms(p.forward)), len(forms(p.backward))) == (2, 4)
    with fusions.disabled(fusions.BY_BLOCKS):
        assert len(planned().segments) > len(p.segments)


def attention() -> te_fuser.Sequential:
    """A norm, a projection with its bias, and attention."""
    heads = ops.DotProductAttention(8, 16, mask="none", layout="sequence_first")
    return te_fuser.Sequential(ops.LayerNorm(IN), ops.MatMul(IN, 3 * IN), ops.Bias(3 * IN), heads)


@needs_compiler
def test_attention_packs_its_gradients_by_blocks(on_an_emulated_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as with the product that quantizes them; the bias's gradient is that of what is not rounded again."""
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    torch.manual_seed(1)
    model = attention().to(torch.bfloat16)
    x, dy = torch.randn(9, 4, IN).bfloat16(), torch.randn(9, 4, IN).bfloat16()

    def run() -> list[torch.Tensor]:
        given = x.clone().requires_grad_()
        model.zero_grad()
        with te_fuser.autocast(recipe=BLOCKS):
            taken = [name for step, name in forms(model.plan(given).backward)]
            assert taken == [f"dy.{layout}" for layout in BOTH] * fusions.enabled(fusions.BY_BLOCKS)
            model(given).backward(dy)
        assert given.grad is not None
        return [given.grad, *[p.grad for p in model.parameters() if p.grad is not None]]

    names = fusions.STRETCH, "own_scales_matmul", ATTENTION
    with fusions.only(*names, fusions.BY_BLOCKS):
        found = run()
    with fusions.only(*names):
        wanted = run()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.01 * b.abs().max().item() if a.dim() == 1 else 0)


@needs_compiler
@pytest.mark.parametrize(("act", "shape", "residual"), [(ops.GELU, (2, 3, 4), True), (ops.SwiGLU, (36,), False)])
def test_nothing_changes(on_an_emulated_gpu: None, act: type[Any], shape: tuple[int, ...], residual: bool) -> None:
    """Outputs and gradients, bit for bit, with and without gradients."""
    torch.manual_seed(1)
    model = mlp(act, residual).to(torch.bfloat16)
    x, dy = torch.randn(*shape, IN).bfloat16(), torch.randn(*shape, IN).bfloat16()

    def run(grad: bool) -> list[torch.Tensor]:
        given = x.clone().requires_grad_(grad)
        model.zero_grad()
        with te_fuser.autocast(recipe=BLOCKS), torch.set_grad_enabled(grad):
            assert forms(model.plan(given).forward) or not fusions.enabled(fusions.BY_BLOCKS)
            y = model(given)
        if not grad:
            return [y]
        y.backward(dy)
        assert given.grad is not None
        return [y.detach(), given.grad, *[p.grad for p in model.parameters() if p.grad is not None]]

    for grad in (True, False):
        found = run(grad)
        with fusions.disabled(fusions.BY_BLOCKS):
            wanted = run(grad)
        assert len(found) == (8 if grad else 1)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b)
