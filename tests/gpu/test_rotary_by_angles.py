"""The kernel that norms and turns heads on a GPU: meaning in float64, poisoned outputs, the same bits again, models."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Fuser, ops
from te_fuser.codegen import nvrtc
from te_fuser.codegen.cuda_source_kernel import arch_on
from te_fuser.config import config
from te_fuser.kernels.qk_norm_rope import Groups, PassInputs, Turned, TurnedPass, Turning
from tests.fake_cuda import forget_written
from tests.gpu.captures import captured
from tests.kernels.test_qk_norm_rope import BLOCKED, CASES, EMPTY, RMS, SIZES, Case, complaints

BF16, EACH = torch.bfloat16, pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of the cases, several at a time."""
    arch = arch_on(0)
    passes = dict.fromkeys(p for case in (*CASES, *LARGE) for p in case.passes())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda p: p.compile(arch, config.cache_dir), passes))


@EACH
def test_values_and_repeatability(case: Case, poisoned: None) -> None:
    for seed, (samples, positions) in enumerate((*SIZES, (5, 300))):
        call = case.inputs(samples, positions, seed, "cuda")
        first, again = case.run(call), case.run(call)
        assert all(torch.equal(t, again[name]) for name, t in first.items())
        assert not complaints(case, call, first), (samples, positions)


@EACH
def test_nothing(case: Case, poisoned: None) -> None:
    for samples, positions in EMPTY:
        made = case.run(case.inputs(samples, positions, device="cuda"))
        y, dx = made.pop("y"), made.pop("dx")
        assert not y.numel() and not dx.numel() and all((t == 0).all() for t in made.values())


LARGE = [
    Case("as Llama turns", 32, 8, 128, BF16, 128, tables="cos_sin", table_dtype=BF16, layout="batch_first", **BLOCKED),
    Case("as Qwen3 norms and turns", 32, 8, 128, BF16, 128, tables="cos_sin", table_dtype=BF16, norm=RMS, weights=BF16,
         layout="batch_first", **BLOCKED),
    Case("as Gemma 3 norms and turns", 8, 4, 256, BF16, 256, tables="cos_sin", table_dtype=BF16, norm=RMS,
         centered=True, weights=BF16, layout="batch_first", **BLOCKED),
    Case("as a layer turns and norms", 32, 32, 64, BF16, 64, norm="LayerNorm", last=True, weights=BF16, columns=BF16),
]  # fmt: skip


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_large(case: Case, poisoned: None) -> None:
    call = case.inputs(3, 700, device="cuda")
    assert not complaints(case, call, case.run(call))


def test_strides(poisoned: None) -> None:
    """Rows that lie apart, samples before positions, and heads that begin where no vector may."""
    case = next(c for c in CASES if c.name == "turned lines")
    call = case.inputs(3, 50, device="cuda")
    want = case.run(call)
    x = call["x"]
    for strided in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat((x, x), -1)[..., : x.shape[-1]],
        torch.cat((x[..., :3], x), -1)[..., 3:],
        torch.stack((x, x), -1)[..., 0],
    ):
        made = case.run({**call, "x": strided})
        assert not strided.is_contiguous() and torch.equal(made["y"], want["y"])


def test_more_elements_than_32_bits_count() -> None:
    """Rows far apart are found where they are."""
    turning = Turning(128, "half", "angles", True, True, torch.float32, None, None, False)
    p = TurnedPass(Groups.of(32, 32, 128, "blocked"), BF16, turning)
    x = torch.randn(180_000, 1, 3 * 32 * 128, device="cuda", dtype=BF16)
    angles = torch.rand(180_000, 1, 1, 128, device="cuda") * 1e4
    assert x.numel() > 2**31
    y, _ = Turned(p, "sequence_first")(x, PassInputs([angles]))
    there, _ = Turned(p, "sequence_first")(x[-5:].clone(), PassInputs([angles[-5:]]))
    assert torch.equal(y[-5:], there)


def test_angles_are_as_pytorch_has_them() -> None:
    """Of all sizes that positions have, in float32."""
    turning = Turning(64, "half", "angles", True, True, torch.float32, None, None, False)
    p = TurnedPass(Groups(1, 1, 0, 0, 64), torch.float32, turning)
    for scale in (1.0, 100.0, 1e4, 1e6, 1e8):
        angles = (torch.rand(4096, 1, 1, 64, device="cuda") - 0.5) * scale
        x = torch.cat((torch.ones(4096, 1, 32), torch.zeros(4096, 1, 32)), -1).cuda()  # gives cosines, then sines
        y, _ = Turned(p, "sequence_first")(x, PassInputs([angles]))
        wide = angles[:, :, 0].double()
        want = torch.cat((wide[..., :32].cos(), wide[..., 32:].sin()), -1)
        assert (y.double() - want).abs().max() < 2e-7


# ------------------------------------------------------------------------------------------------- in models


def layer(**options: Any) -> te_fuser.TransformerLayer:
    torch.manual_seed(1)
    sizes = {"num_gqa_groups": 2, "kv_channels": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te_fuser.TransformerLayer(256, 512, 4, **{**sizes, "params_dtype": BF16, "device": "cuda", **options})


def angles_of(length: int) -> torch.Tensor:
    return te_fuser.RotaryPositionEmbedding(64, device="cuda")(length)


def gradients(run: Any, model: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    leaves = {"x": x, **dict(model.named_parameters())}
    found = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach(), **dict(zip(leaves, found, strict=True))}


@pytest.mark.parametrize("norm", [None, "RMSNorm", "LayerNorm", "L2Normalization"])
@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
def test_layers(form: str, norm: str | None) -> None:
    """Values and all gradients, at most twice as far from float64 as the ops one by one."""
    mask = {"self_attn_mask_type": "padding_causal"} if form == "thd" else {}
    own = layer(attn_input_format=form, qk_norm_type=norm, qk_norm_before_rope=form == "bshd", **mask)
    exact = copy.deepcopy(own).double()
    shape = {"sbhd": (96, 3), "bshd": (3, 96), "thd": (288,)}[form]
    x, dy = (torch.randn(*shape, 256, device="cuda", dtype=BF16) for _ in range(2))
    ends = torch.tensor([0, 100, 190, 288], device="cuda", dtype=torch.int32)
    call: dict[str, Any] = {"rotary_pos_emb": angles_of(288 if form == "thd" else 96)}
    call |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends} if form == "thd" else {}
    names = (
        "turned_heads_forward",
        "turned_heads_backward",
        "turned_heads_norm_backward",
        "turned_heads_bias_norm_backward",
    )
    found = gradients(lambda t: own(t, **call), own, x, dy)
    with te_fuser.fusions.disabled(*names):
        usual = gradients(lambda t: own(t, **call), own, x, dy)
        want = gradients(lambda t: exact(t, **call), exact, x.double(), dy.double())
    for name, one in found.items():
        error, allowed = ((t[name].double() - want[name]).abs().max() for t in (found, usual))
        assert error <= 2 * allowed + torch.finfo(BF16).eps * want[name].abs().max(), name
        assert one.dtype == BF16


def test_plans_take_it_and_calls_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_written()
    listed = [
        ops.Linear(64, 3 * 72), ops.HeadNorm(24, heads=3, kv_heads=3), ops.RotaryByAngles(24, heads=3, kv_heads=3),
        ops.DotProductAttention(3, 24, mask="causal", layout="sequence_first"),
    ]  # fmt: skip
    for op in listed:
        op.to("cuda", BF16)
    fuser, x = Fuser(listed), torch.randn(40, 2, 64, device="cuda", dtype=BF16, requires_grad=True)
    given = {"rotary_pos_emb": torch.rand(40, 1, 1, 24, device="cuda")}
    prepared, _ = fuser.prepare(x, given)
    assert "turned_heads_forward" in {s.name for s in prepared.plan.forward}
    assert "turned_heads_bias_norm_backward" in {s.name for s in prepared.plan.backward}
    monkeypatch.setattr(nvrtc, "compile_source", lambda *a, **k: pytest.fail("a call compiles"))
    fuser(x, **given).sum().backward()


def test_a_captured_graph_reads_angles_and_starts_anew() -> None:
    case = next(c for c in CASES if c.name == "pairs that are no whole vectors")
    call = case.inputs(4, 20, device="cuda")
    graph, got = captured(lambda: case.run(call))
    other = case.inputs(4, 20, 7, "cuda")
    for name in ("x", "dy", "starts"):
        call[name].copy_(other[name])
    call["tables"][0].copy_(other["tables"][0])
    graph.replay()
    torch.cuda.synchronize()
    want = case.run(other)
    assert all(torch.equal(t, want[name]) for name, t in got.items())
