"""The kernel over packed heads on a GPU: its meaning in float64, poisoned outputs, the same bits again, large sizes."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels.packed_heads import Packing, Rotation, turn
from te_fuser.ops.attention.heads import PackedHeads
from tests.gpu.captures import captured
from tests.kernels.packed_cases import CASES, EMPTY, SIZES, Case, complaints

pytestmark = pytest.mark.usefixtures("poisoned")


def on_gpu(case: Case, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return case.run(x.cuda(), None if bias is None else bias.cuda())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_values_and_repeatability(case: Case) -> None:
    for seed, (samples, positions) in enumerate((*SIZES, (5, 700))):
        x, bias = case.inputs(samples, positions, seed)
        first, again = on_gpu(case, x, bias), on_gpu(case, x, bias)
        for one, other in zip(first, again, strict=True):
            assert one is None or torch.equal(one, other)  # type: ignore[arg-type]
        got = tuple(None if t is None else t.cpu() for t in first)
        assert not complaints(case, samples, positions, got, seed), (samples, positions)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing(case: Case) -> None:
    for samples, positions in EMPTY:
        x, bias = case.inputs(samples, positions)
        y, sums = on_gpu(case, x, bias)
        assert y.shape == x.shape and (sums is None or (sums == 0).all())


LARGE = [
    Case("as a GPT layer packs", PackedHeads(32, 32, 128), torch.bfloat16, parts=True, sums=torch.bfloat16),
    Case("as a Llama layer packs", PackedHeads(32, 8, 128), torch.bfloat16, 128, parts=True),
    Case("as a GPT layer packs in 8 bits", PackedHeads(32, 32, 128), torch.bfloat16, parts=True, sums=torch.bfloat16,
     stored=torch.float8_e5m2),
    Case("as a Llama layer turns", PackedHeads(32, 8, 128, "batch_first"), torch.float16, 128, bias=torch.float32),
]  # fmt: skip


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_large(case: Case) -> None:
    x, bias = case.inputs(3, 600)
    y, sums = on_gpu(case, x, bias)
    got = y.cpu(), None if sums is None else sums.cpu()
    assert not complaints(case, 3, 600, got, 0)


def test_more_elements_than_32_bits_count() -> None:
    """Rows far apart are found where they are."""
    heads, rotation = PackedHeads(32, 32, 128), Rotation(128, 10000.0, "half")
    x = torch.randn(180_000, 1, heads.features, device="cuda", dtype=torch.bfloat16)
    assert x.numel() > 2**31
    last = x[-5:].clone()
    y, _ = turn(heads, rotation, x)
    there, _ = turn(heads, Rotation(128, 10000.0, "half", x.shape[0] - 5), last)
    assert torch.equal(y[-5:], there)
    back, sums = Packing(heads, rotation)(heads.split(y), sums=torch.float32)
    assert sums is not None and (back[-5:].float() - last.float()).abs().max() <= 2.0**-6 * last.abs().max().float()
    torch.testing.assert_close(sums, back.float().sum((0, 1)), rtol=0.0, atol=8.0)  # of some hundreds


def test_a_captured_graph_repeats_it() -> None:
    (case,) = (case for case in CASES if case.name == "packed and turned")
    x = case.inputs(2, 50)[0].cuda()
    want = on_gpu(case, x, None)
    graph, got = captured(lambda: on_gpu(case, x, None))
    graph.replay()
    torch.cuda.synchronize()
    assert all(one is None or torch.equal(one, other) for one, other in zip(got, want, strict=True))  # type: ignore[arg-type]
