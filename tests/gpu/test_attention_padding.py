"""Padding by boolean tensors on a GPU, by kernels told lengths and offsets; rows that are blanked, moved, and NaN."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.codegen.cuda_loader import load
from te_fuser.kernels.attention import lengths, padding
from te_fuser.kernels.attention.lengths import Blanks, Side
from te_fuser.kernels.attention.padding import CompactByKernel, CompactByTorch
from te_fuser.ops.attention.mask import AttentionMask
from tests.gpu.captures import captured
from tests.gpu.packing_providers import NEEDS_PACKAGE, in_plans, nothing_waits  # noqa: F401 - a fixture
from tests.gpu.test_attention_apart import check, gradients, takes
from tests.kernels.attention import blanked, padded

TOLD = ["cuda_flash", pytest.param("cuda_flash_attn_4", marks=NEEDS_PACKAGE)]
DTYPE = torch.bfloat16
pytestmark = pytest.mark.usefixtures("in_plans")


def model_of(name: str, layout: str, kind: str, dim: int, times: int) -> tuple[te_fuser.Sequential, torch.Tensor, dict]:
    """The list of that case's op, its input and its named ones, on the CPU."""
    op, tensors = padded.case(name, layout, kind, dim, times, DTYPE)
    inputs = {op.hides.names.get(argument, argument): t for argument, t in tensors.items()}
    return te_fuser.Sequential(op), inputs.pop("input"), inputs


@pytest.mark.parametrize("kind", padded.KINDS)
@pytest.mark.parametrize("name", padded.MASKS)
@pytest.mark.parametrize("provider", TOLD)
def test_values_and_gradients(provider: str, name: str, kind: str) -> None:
    for dim, times, layout in ((128, 37, "batch_first"), (64, 19, "sequence_first"), (64, 3, "batch_first")):
        model, x, inputs = model_of(name, layout, kind, dim, times)
        with fusions.only("stretch", f"attention_{provider}"):
            found = takes(provider, model, x, inputs, DTYPE)
            if found is not True:
                words = ("own offsets", "offsets or lengths of their own")
                assert provider != "cuda_flash" and any(w in str(found) for w in words), found
                continue
            check(model, x, inputs, DTYPE)


def on_gpu(model: te_fuser.Sequential, x: torch.Tensor, inputs: dict) -> tuple[te_fuser.Sequential, torch.Tensor, dict]:
    return model.to("cuda", DTYPE), x.to("cuda", DTYPE), {n: t.to("cuda") for n, t in inputs.items()}


@pytest.mark.parametrize("provider", TOLD)
def test_nothing_waits_for_the_device(provider: str) -> None:
    model, x, inputs = on_gpu(*model_of("packed, causal", "batch_first", "anywhere", 128, 37))
    with fusions.only("stretch", f"attention_{provider}"):
        assert takes(provider, model, x, inputs, DTYPE) is True
        gradients(model, model, x, inputs)
        dy, x = torch.ones_like(model(x, **inputs)), x.detach().requires_grad_()
        with nothing_waits():
            torch.autograd.grad(model(x, **inputs), x, dy)


@pytest.mark.parametrize("provider", TOLD)
def test_a_capture_takes_other_masks(provider: str) -> None:
    model, x, inputs = on_gpu(*model_of("packed", "batch_first", "end", 128, 37))
    with fusions.only("stretch", f"attention_{provider}"), torch.no_grad():
        graph, y = captured(lambda: model(x, **inputs))
        for kind in padded.KINDS:
            inputs["pad"].copy_(padded.mask_of(kind, x.shape[1]))
            graph.replay()
            assert torch.equal(y, model(x, **inputs)), kind


@pytest.fixture
def kernels() -> None:
    """Load the kernels that plans compile."""
    made = [lengths.BlankRows(DTYPE), padding.FindTokens(), padding.MoveRows(DTYPE)]
    load([], torch.device("cuda:0"), written=made)


@pytest.mark.parametrize("name", blanked.CASES)
def test_rows_that_are_blanked(name: str, kernels: None) -> None:
    def moved(side: Side | None) -> Side | None:
        if side is None:
            return None
        return Side(side.positions, *(None if t is None else t.cuda() for t in (side.offsets, side.lengths)))

    b = blanked.CASES[name]
    own = moved(b.own)
    assert own is not None
    for features in (24, 4096):
        x = blanked.rows_for(b, DTYPE, features)
        ours = x.cuda()
        lengths.blank_by_kernel(ours, Blanks(own, moved(b.other), b.longest, b.sequence_first))
        torch.testing.assert_close(ours.cpu(), blanked.blanked(x, b), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("sequence_first", [False, True])
@pytest.mark.parametrize("kind", padded.KINDS)
def test_rows_that_are_moved(kind: str, sequence_first: bool, kernels: None) -> None:
    for positions, features in ((7, 24), (333, 4096), (2048, 512)):
        mask = padded.mask_of(kind, positions).cuda()
        x = torch.randn(padded.B, positions, features, device="cuda", dtype=DTYPE)
        x = x.transpose(0, 1).contiguous() if sequence_first else x
        (ours, _), (theirs, _) = (way.find(mask, None, positions, None) for way in (CompactByKernel, CompactByTorch))
        assert torch.equal(ours.lengths, theirs.lengths) and torch.equal(ours.offsets, theirs.offsets)
        count = int(ours.offsets[-1])
        rows = x.transpose(0, 1) if sequence_first else x
        made, want = (way.together(rows, theirs)[:count] for way in (CompactByKernel, CompactByTorch))
        assert torch.equal(made, want)
        made = CompactByKernel.together(rows, ours)
        for pieces in (1, 3) if features == 24 else (1, 8):
            to = [
                torch.zeros(*rows.shape[:2], pieces, 8 + features // pieces, device="cuda", dtype=DTYPE) for _ in "ab"
            ]
            for way, tensor in zip((CompactByKernel, CompactByTorch), to, strict=True):
                way.back(made, ours, tensor[..., 8:])
            assert torch.equal(*to)


@pytest.mark.parametrize("provider", TOLD)
def test_what_lies_outside_is_nan(provider: str) -> None:
    """Lengths beyond the positions, sequences longer than the longest; the others are right."""
    for mask, layout, wrong, right in (
        (AttentionMask(lengths="n"), "batch_first", {"n": [200, 300, 7]}, {"n": [200, 256, 7]}),
        (AttentionMask(offsets="n", longest=250), "tokens", {"n": [0, 250, 501, 512]}, {"n": [0, 250, 501, 512]}),
        (AttentionMask(causal=True, offsets="n"), "tokens", {"n": [0, 250, 900]}, {"n": [0, 250, 512]}),
    ):
        tokens = layout == "tokens"
        op = ops.DotProductAttention(4, 64, mask=mask, layout=layout)
        other = ops.DotProductAttention(
            4, 64, mask=AttentionMask(causal=mask.causal, offsets="n") if tokens else mask, layout=layout
        )
        x = torch.randn(*((512,) if tokens else (3, 256)), op.packed.features, device="cuda", dtype=DTYPE)
        said, meant = ({n: torch.tensor(t, device="cuda") for n, t in given.items()} for given in (wrong, right))
        with fusions.only("stretch", f"attention_{provider}"):
            model, usual = te_fuser.Sequential(op), te_fuser.Sequential(other)
            assert takes(provider, model, x, said, DTYPE) is True
            for ours, want in zip(gradients(model, model, x, said), gradients(usual, usual, x, meant), strict=True):
                bad = torch.zeros(ours.shape[:-1], dtype=torch.bool, device="cuda")
                bad[250 : right["n"][2]] = tokens
                if not tokens:
                    bad[1] = True
                assert ours[bad].isnan().all()
                torch.testing.assert_close(ours[~bad], want[~bad], rtol=0.02, atol=0.02)


def test_positions_without_angles_or_room_are_nan() -> None:
    x = torch.randn(4, 2, 2 * 8, device="cuda", dtype=DTYPE)
    model = te_fuser.Sequential(ops.RotaryByAngles(8, heads=2, starts="first"))
    y = model(x, rotary_pos_emb=torch.randn(5, 1, 1, 8, device="cuda"), first=torch.tensor([1, 3], device="cuda"))
    assert y[2:, 1].isnan().all() and y[:2].isfinite().all() and y[:, 0].isfinite().all()
    cache = torch.zeros(6, 2, 8, device="cuda", dtype=DTYPE)
    given = {"key_cache": cache, "value_cache": cache.clone(), "starts": torch.tensor([0, 3], device="cuda")}
    x = torch.randn(4, 2, 4 * 8, device="cuda", dtype=DTYPE)
    with torch.no_grad():
        op = te_fuser.Sequential(ops.KeyValueCache(8, heads=2, kv_heads=1))
        q = op(x, counts=torch.tensor([2, 4], device="cuda"), **given)
    assert q[2:, 1].isnan().all() and q[:2].isfinite().all() and q[:, 0].isfinite().all()
