"""Angles of positions, and heads turned by them, against the formula."""

from __future__ import annotations

import pytest
import torch

from te_fuser.presets.rotary_position_embedding import RotaryPositionEmbedding, apply_rotary_pos_emb
from tests.presets.plain import turned
from tests.twins import tensor

S, B, H, D = 7, 3, 4, 8


def angles(turning: int, positions: torch.Tensor, base: float = 10000.0) -> torch.Tensor:
    k = torch.arange(turning // 2, dtype=torch.float64)
    return positions.double()[:, None] * base ** (-2 * k / turning)


@pytest.mark.parametrize("interleaved", [False, True])
def test_angles(interleaved: bool) -> None:
    def made(*args: float, at: tuple[int, ...] = (2,), **keywords: float) -> torch.Tensor:
        keywords |= {"interleaved": True} if interleaved else {}
        found = RotaryPositionEmbedding(D, *args, device="cpu", **keywords)(S, *at)  # type: ignore[arg-type]
        assert found.shape[1:3] == (1, 1) and found.dtype == torch.float32
        return (found[..., 0::2] if interleaved else found[..., : found.shape[-1] // 2])[:, 0, 0].double()

    at = torch.arange(2, S + 2)
    torch.testing.assert_close(made(), angles(D, at), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made(at=()), angles(D, torch.arange(S)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made(0.5), angles(4, at), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(made(rotary_base=100.0), angles(D, at, 100.0), rtol=1e-6, atol=1e-6)
    for alone in ("seq_len_interpolation_factor", "pretrained_max_position_embeddings"):
        torch.testing.assert_close(made(**{alone: 2}), angles(D, at), rtol=1e-6, atol=1e-6)
    squeezed = made(seq_len_interpolation_factor=2, pretrained_max_position_embeddings=4)
    torch.testing.assert_close(squeezed, angles(D, at / 2), rtol=1e-6, atol=1e-6)
    squeezed = made(seq_len_interpolation_factor=2, pretrained_max_position_embeddings=3)
    torch.testing.assert_close(squeezed, angles(D, at * 3 / S), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("size", [D, 4])
def test_heads_are_turned(order: str, interleaved: bool, size: int) -> None:
    table = RotaryPositionEmbedding(size, interleaved=interleaved, device="cpu")(S + 3)
    given = {"tensor_format": order, **({"interleaved": True} if interleaved else {})}
    for starts in (None, torch.tensor([0, 3, 1])):
        first = [0] * B if starts is None else starts.tolist()
        if order == "thd":
            t, ends = tensor(10, H, D), torch.tensor([0, 2, 2, 10])
            y = apply_rotary_pos_emb(t, table, start_positions=starts, cu_seqlens=ends, **given)
            pieces = [
                turned(t[None, a:b].transpose(1, 2), table[at : at + b - a, 0].transpose(0, 1).double(), interleaved)
                for a, b, at in zip(ends[:-1].tolist(), ends[1:].tolist(), first, strict=True)
                if b > a
            ]
            want = torch.cat(pieces, 2)[0].transpose(0, 1)
        else:
            t = tensor(*((S, B) if order == "sbhd" else (B, S)), H, D)
            y = apply_rotary_pos_emb(t, table, start_positions=starts, **given)
            heads = t.permute((1, 2, 0, 3) if order == "sbhd" else (0, 2, 1, 3))
            by = torch.stack([table[at : at + S, 0, 0] for at in first])[:, None].double()
            want = turned(heads, by, interleaved).permute((2, 0, 1, 3) if order == "sbhd" else (0, 2, 1, 3))
        torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
        dy = tensor(*y.shape, grad=False, seed=3)
        ours, theirs = (torch.autograd.grad(out, t, dy)[0] for out in (y, want))
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_ranks_that_cut_the_sequence(order: str) -> None:
    """Each turns its two blocks by where they stand in the whole."""
    whole, ranks, dim = tensor(12, B, H, D), 3, {"sbhd": 0, "bshd": 1}[order]
    whole = whole.transpose(0, dim)
    table = RotaryPositionEmbedding(D, device="cpu")(13).double()
    want = apply_rotary_pos_emb(whole, table, order).chunk(2 * ranks, dim)
    for rank in range(ranks):
        blocks = whole.chunk(2 * ranks, dim)
        mine = torch.cat([blocks[rank], blocks[2 * ranks - 1 - rank]], dim)
        got = apply_rotary_pos_emb(mine, table, order, cp_size=ranks, cp_rank=rank)
        torch.testing.assert_close(got, torch.cat([want[rank], want[2 * ranks - 1 - rank]], dim))
