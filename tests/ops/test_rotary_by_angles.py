"""Rotary embedding by angles of the call: against RotaryEmbedding, and against the formula by hand."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.ops.rotary_embedding import rotation_table
from tests.ops.check import normal

S, B, D = 7, 2, 8


def angles_of(style: str, turning: int = D, length: int = S) -> torch.Tensor:
    """[length, 1, 1, turning], as RotaryEmbedding turns."""
    positions = torch.arange(length, dtype=torch.float64)[:, None]
    half = positions * 10000.0 ** (-torch.arange(0, turning, 2, dtype=torch.float64) / turning)
    whole = torch.cat((half, half), -1) if style == "half" else torch.stack((half, half), -1).flatten(-2)
    return whole[:, None, None]


def gradients(model: te_fuser.Sequential, x: torch.Tensor, **named: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = model(x, **named)
    return [y.detach(), torch.autograd.grad(y, x, normal(*y.shape, seed=5).to(y))[0]]


@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_as_rotary_embedding(layout: str, packing: str, style: str) -> None:
    shape = (S, B) if layout == "sequence_first" else (B, S)
    for heads, kv_heads, turning in ((4, 4, D), (4, 2, 4), (3, 1, 6)):
        how = {"heads": heads, "kv_heads": kv_heads, "layout": layout, "packing": packing, "style": style}
        x = normal(*shape, (heads + 2 * kv_heads) * D)
        table = ops.RotaryEmbedding(D, rotary_dim=turning, **how)
        given = te_fuser.Sequential(ops.RotaryByAngles(D, **how), verify=True)
        named = {"rotary_pos_emb": angles_of(style, turning, S + 3)}
        torch.testing.assert_close(gradients(given, x, **named), gradients(te_fuser.Sequential(table), x))
        cos_sin = te_fuser.Sequential(ops.RotaryByAngles(D, cos_sin=("c", "s"), **how))
        named = {"c": named["rotary_pos_emb"].cos(), "s": named["rotary_pos_emb"].sin()}
        torch.testing.assert_close(gradients(cos_sin, x, **named), gradients(te_fuser.Sequential(table), x))
        torch.testing.assert_close(gradients(given, x)[0], x)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("layout", ["sequence_first", "batch_first"])
def test_queries_and_keys_apart_and_starts(style: str, layout: str) -> None:
    shape = (S, B) if layout == "sequence_first" else (B, S)
    how = {"layout": layout, "style": style}
    packed = te_fuser.Sequential(
        ops.RotaryByAngles(D, heads=2, kv_heads=1, packing="blocked", angles=("qa", "ka"), starts="first", **how)
    )
    alone = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, angles="qa", starts="first", **how))
    x, starts = normal(*shape, 4 * D), torch.tensor([3, 0])
    tables = {name: normal(S + 3, 1, 1, 4, seed=k) for k, name in enumerate(("qa", "ka"))}
    y, dx = gradients(packed, x, **tables, first=starts)
    q, dq = gradients(alone, x[..., : 2 * D].contiguous(), qa=tables["qa"], first=starts)
    torch.testing.assert_close(y[..., : 2 * D], q)
    assert torch.equal(y[..., 3 * D :], x[..., 3 * D :])
    assert dq.shape == q.shape and not torch.equal(dx[..., : 2 * D], x[..., : 2 * D])
    for sample, start in enumerate(starts.tolist()):
        at = (slice(None), slice(sample, sample + 1)) if layout == "sequence_first" else slice(sample, sample + 1)
        one = {name: t[start : start + S] for name, t in tables.items()}
        torch.testing.assert_close(packed(x[at].contiguous(), **one), y[at])
    (by_autograd,) = gradients(te_fuser.Sequential(*packed), x, **tables, first=starts)[1:]
    leaf = x.clone().requires_grad_()
    want = packed.reference(leaf, **tables, first=starts)
    torch.testing.assert_close(torch.autograd.grad(want, leaf, normal(*y.shape, seed=5))[0], by_autograd)
    only_keys = packed(x, ka=tables["ka"])
    assert torch.equal(only_keys[..., : 2 * D], x[..., : 2 * D]) and not torch.equal(only_keys, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounded_once(dtype: torch.dtype) -> None:
    model = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2))
    x, angles = normal(S, B, 2 * D).to(dtype), angles_of("half").float()
    y, exact = model(x, rotary_pos_emb=angles), model(x.double(), rotary_pos_emb=angles.double())
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= 0.51 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all()
    cos, sin = rotation_table(((0, S),), D, 10000.0, torch.float64, x.device)
    a, b = x.double().view(S, B, 2, 2, D // 2).unbind(-2)
    cos, sin = cos[:, None, None], sin[:, None, None]
    want = torch.stack((a * cos - b * sin, b * cos + a * sin), -2).view(x.shape)
    torch.testing.assert_close(exact, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [None, 2])
def test_sequences_one_behind_the_other(kv_heads: int | None, dtype: torch.dtype) -> None:
    """Each token by its place in its sequence, which may begin later; what lies behind the last stays in range."""
    how = {"heads": 2, "kv_heads": kv_heads}
    model = te_fuser.Sequential(ops.RotaryByAngles(D, layout="tokens", offsets="ends", starts="first", **how))
    alone = te_fuser.Sequential(ops.RotaryByAngles(D, starts="first", **how))
    features = (2 + 2 * (kv_heads or 0)) * D
    x, angles = normal(12, features).to(dtype), angles_of("half").float()
    ends, first = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 1, 2])
    for starts in (None, first):
        y, dx = gradients(model, x, rotary_pos_emb=angles, ends=ends, first=starts)
        dy = normal(*y.shape, seed=5).to(dtype)
        for n in (0, 2):
            where = slice(ends[n], ends[n + 1])
            part = x[where, None].detach().requires_grad_()
            want = alone(part, rotary_pos_emb=angles, first=None if starts is None else starts[n : n + 1])
            torch.testing.assert_close(y[where], want[:, 0])
            torch.testing.assert_close(dx[where], torch.autograd.grad(want, part, dy[where, None])[0][:, 0])
    with pytest.raises(ValueError, match=r"ends are whole numbers \[sequences \+ 1\], got none"):
        model(x, rotary_pos_emb=angles)
    with pytest.raises(ValueError, match="takes offsets, and no other does"):
        ops.RotaryByAngles(D, layout="tokens", heads=2)


def test_what_is_not_given_costs_nothing() -> None:
    """A list plans as if the op was not there, alone and in the middle."""
    op, x = ops.RotaryByAngles(D, heads=2, kv_heads=1), normal(S, B, 4 * D).float().requires_grad_()
    model = te_fuser.Sequential(
        ops.Bias(4 * D), op, ops.DotProductAttention(2, D, kv_heads=1, mask="none", layout="sequence_first")
    )
    angles = {"rotary_pos_emb": angles_of("half").float()}
    names = [[step.name for step in model.plan(x, **given).steps] for given in (angles, {})]
    assert any("rotary" in name for name in names[0]) and not any("rotary" in name for name in names[1])
    without = te_fuser.Sequential(model[0], model[2])
    for got, want in zip(gradients(model, x), gradients(without, x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(gradients(te_fuser.Sequential(op), x)[0], x.detach())


@pytest.mark.parametrize("shape", [(0, B), (S, 0)])
def test_no_rows(shape: tuple[int, int]) -> None:
    model, x = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, kv_heads=1)), torch.zeros(*shape, 4 * D)
    y, dx = gradients(model, x, rotary_pos_emb=torch.zeros(S, 1, 1, D))
    assert y.shape == dx.shape == x.shape


def test_what_does_not_fit() -> None:
    model, x = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, starts="first")), normal(S, B, 2 * D).float()
    for shape in ((S - 1, 1, 1, D), (S, 3, 1, D), (S, 1, 1, 5), (S, 1, 1, D + 2), (S, D)):
        with pytest.raises(ValueError, match=r"angles must be \[7 or more, 1 or 2, 1, D\] with an even D of at most 8"):
            model(x, rotary_pos_emb=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"starts are whole numbers \[2\], got torch.float32"):
        model(x, rotary_pos_emb=torch.zeros(S, 1, 1, D), first=torch.zeros(2))
    with pytest.raises(ValueError, match="was made for 16 features, got 8"):
        model(x[..., :8], rotary_pos_emb=torch.zeros(S, 1, 1, D))
    with pytest.raises(ValueError, match="cosines and sines together"):
        te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, cos_sin=("c", "s")))(x, c=torch.zeros(S, 1, 1, D))


def test_positions_behind_the_angles() -> None:
    """Refused on a CPU, where they are no padding."""
    x, angles, starts = normal(S, B, 2 * D), angles_of("half"), torch.tensor([0, 2])
    model = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, starts="first"))
    words = (
        "row 5 of sample 1 stands at position 7, and there are angles of 7 positions: give more of them, or lower first"
    )
    with pytest.raises(ValueError, match=words):
        model(x, rotary_pos_emb=angles, first=starts)
    with pytest.raises(ValueError, match="row 0 of sample 0 stands at position -1"):
        model(x, rotary_pos_emb=angles, first=torch.tensor([-1, 0]))
    padded = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, starts="first", padded=True))
    longer = torch.cat((angles, angles[-1:].expand(2, -1, -1, -1)))
    torch.testing.assert_close(
        gradients(padded, x, rotary_pos_emb=angles, first=starts),
        gradients(model, x, rotary_pos_emb=longer, first=starts),
    )


def test_sequences_longer_than_the_angles() -> None:
    model = te_fuser.Sequential(ops.RotaryByAngles(D, layout="tokens", offsets="ends", starts="first", heads=2))
    x, angles, ends = normal(9, 2 * D), angles_of("half", length=9), torch.tensor([0, 4, 9])
    model(x, rotary_pos_emb=angles, ends=ends, first=torch.tensor([5, 4]))
    with pytest.raises(ValueError, match="row 3 stands at position 9, and there are angles of 9 positions"):
        model(x, rotary_pos_emb=angles, ends=ends, first=torch.tensor([6, 4]))
