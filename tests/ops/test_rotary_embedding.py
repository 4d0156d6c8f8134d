"""Rotary embedding against complex numbers: every layout, packing, style and partial size."""

from __future__ import annotations

import cmath
import itertools

import pytest
import torch

from te_fuser.ops import rotary_embedding
from te_fuser.ops.base import OpCall, Spec
from te_fuser.ops.rotary_embedding import RotaryEmbedding, rotation_table

LAYOUTS = ("sequence_first", "batch_first")
PACKINGS = ("interleaved", "blocked")
STYLES = ("half", "interleaved")
SAMPLES, POSITIONS = 2, 7


def turned_by_hand(op, x, direction=1):
    """Number by number: pair (a, b) as a + b i, times exp(i angle), for all heads but the values'."""
    heads, groups, dim, turning = op.heads, op.kv_heads, op.head_dim, op.rotary_dim
    per_group = heads // groups
    if op.packing == "blocked":
        starts = range(heads + groups)
    else:
        starts = [g * (per_group + 2) + r for g in range(groups) for r in range(per_group + 1)]
    y = x.clone()
    for first, pair in itertools.product(starts, range(turning // 2)):
        one, two = (2 * pair, 2 * pair + 1) if op.style == "interleaved" else (pair, pair + turning // 2)
        one, two = first * dim + one, first * dim + two
        for position in range(POSITIONS):
            angle = direction * (op.position_offset + position) * op.base ** (-2 * pair / turning)
            at = (position,) if op.layout == "sequence_first" else (slice(None), position)
            number = torch.complex(x[(*at, ..., one)], x[(*at, ..., two)]) * cmath.exp(1j * angle)
            y[(*at, ..., one)], y[(*at, ..., two)] = number.real, number.imag
    return y


def make(head_dim=8, heads=4, kv_heads=2, dtype=torch.float64, **arguments):
    op = RotaryEmbedding(head_dim, heads=heads, kv_heads=kv_heads, **arguments)
    shape = (POSITIONS, SAMPLES) if op.layout == "sequence_first" else (SAMPLES, POSITIONS)
    x = torch.randn(*shape, op.packed.features, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return op, x.to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("style", STYLES)
def test_values_and_gradients(layout, packing, style):
    for kv_heads, (dim, turning), offset in itertools.product((4, 2, 1), ((8, None), (8, 4), (5, 2)), (0, 11)):
        op, x = make(
            dim,
            kv_heads=kv_heads,
            layout=layout,
            packing=packing,
            style=style,
            rotary_dim=turning,
            position_offset=offset,
            base=100.0,
        )
        before = x.clone()
        y = op.op_forward(OpCall(), x)
        torch.testing.assert_close(y, turned_by_hand(op, x), rtol=0, atol=1e-14)
        torch.testing.assert_close(op.op_backward(OpCall(), x), turned_by_hand(op, x, -1), rtol=0, atol=1e-14)
        assert torch.equal(x, before) and y.data_ptr() != x.data_ptr()
        leaf = x.clone().requires_grad_()
        reference = op.reference(OpCall(), leaf)
        torch.testing.assert_close(reference.detach(), y, rtol=0, atol=1e-14)
        dy = torch.randn_like(x)
        torch.testing.assert_close(torch.autograd.grad(reference, leaf, dy)[0], op.op_backward(OpCall(), dy))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_rounding(style, dtype):
    """Far positions too: the angles are float32 at least, and the result is rounded once."""
    op, x = make(style=style, dtype=dtype, position_offset=5000)
    y = op.op_forward(OpCall(), x)
    want = turned_by_hand(op, x.double())
    assert y.dtype == dtype
    assert ((y.double() - want).abs() <= 0.51 * torch.finfo(dtype).eps * want.abs() + 1e-6).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("style", STYLES)
def test_in_pieces_as_in_one(layout, style, monkeypatch):
    for dtype, packing in itertools.product((torch.float32, torch.bfloat16), PACKINGS):
        op, x = make(layout=layout, style=style, packing=packing, dtype=dtype)
        whole = op.op_forward(OpCall(), x)
        with monkeypatch.context() as patch:
            patch.setattr(rotary_embedding, "_CHUNK", 2 * x[0].numel() if layout == "sequence_first" else 1)
            assert torch.equal(op.op_forward(OpCall(), x), whole)


def test_strided_inputs_and_gradients():
    for layout, packing, style in itertools.product(LAYOUTS, PACKINGS, STYLES):
        op, x = make(layout=layout, packing=packing, style=style)
        y = op.op_forward(OpCall(), x)
        transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
        for strided in (transposed, torch.cat((x, x), -1)[..., : x.shape[-1]], torch.stack((x, x), -1)[..., 0]):
            assert torch.equal(op.op_forward(OpCall(), strided), y)
        for few in (x[:1, :1, :1], x[:1], x[:, :1], x[..., :1]):
            dy = few.expand(x.shape)
            assert torch.equal(op.op_backward(OpCall(), dy), op.op_backward(OpCall(), dy.contiguous()))


@pytest.mark.parametrize("shape", [(0, 7), (7, 0), (0, 0), (1, 1)])
def test_empty_and_single(shape):
    for layout, packing, style in itertools.product(LAYOUTS, PACKINGS, STYLES):
        op, _ = make(layout=layout, packing=packing, style=style)
        x = torch.randn(*shape, op.packed.features)
        assert op.op_forward(OpCall(), x).shape == x.shape
    torch.testing.assert_close(op.op_forward(OpCall(), torch.ones(1, 1, 64)), torch.ones(1, 1, 64))


def test_scores_depend_on_distance_alone():
    op, _ = make(8, heads=1, kv_heads=1, style="half")
    row = torch.randn(1, 1, 24, dtype=torch.float64).expand(POSITIONS, 1, 24)
    q, k, v = op.packed.split(op.op_forward(OpCall(), row))
    scores = (q[0, 0, 0] @ k[0, 0].mT).diagonal(offset=2)
    torch.testing.assert_close(scores, scores[:1].expand_as(scores))
    assert torch.equal(v[0, 0], row[:, 0, 16:])


def test_the_table_is_shared_and_not_in_the_state():
    device = torch.device("cpu")
    small = rotation_table(((0, 5),), 8, 10000.0, torch.float32, device)
    large = rotation_table(((1, 7),), 8, 10000.0, torch.float32, device)
    assert small[0].data_ptr() == large[0].data_ptr() - 4 * 4
    assert small[0].shape == (5, 4) and large[1].shape == (7, 4)
    op, x = make()
    before = op.revision
    op.op_forward(OpCall(), x)
    assert not op.state_dict() and op.revision == before


def test_a_table_made_in_a_capture_is_not_handed_out_later(monkeypatch):
    """It lies in the graph's memory, and has its values in replays alone; one that a graph reads is not dropped."""
    captures, made, device = [True], [], torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures[0])

    def make(*given):
        made.append(given)
        return torch.zeros(1), torch.zeros(1)

    kept = rotary_embedding._TableCache(make, 1)
    first, second = kept(0, device), kept(0, device)
    assert first is not second and len(made) == 2
    captures[0] = False
    known = kept(0, device)
    assert known is not second and kept(0, device) is known and len(made) == 3
    captures[0] = True
    assert kept(0, device) is known
    captures[0] = False
    kept(1, device), kept(2, device)
    assert kept(0, device) is known and len(made) == 5
    assert kept(1, device) is not None and len(made) == 6, "dropped"
    assert rotary_embedding.rotation_table(((0, 5),), 8, 10.0, torch.float32, torch.device("cpu"))[0].shape == (5, 4)


def test_a_table_made_in_inference_mode_can_be_recorded():
    rotary_embedding._table.clear()
    op, x = make()
    with torch.inference_mode():
        op.op_forward(OpCall(), x)
    op.reference(OpCall(), x.requires_grad_()).sum().backward()


def test_changed_attributes_are_used():
    op, x = make()
    op.op_forward(OpCall(), x)
    op.base, op.position_offset = 50.0, 3
    torch.testing.assert_close(op.op_forward(OpCall(), x), turned_by_hand(op, x))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"head_dim": 7}, r"rotary_dim must be even and in \[2, head_dim = 7\], got 7"),
     ({"rotary_dim": 10}, "rotary_dim must be even .* got 10"), ({"rotary_dim": 0}, "rotary_dim must be even .* got 0"),
     ({"base": 0.0}, r"base must be positive, got 0\.0"),
     ({"position_offset": -1}, "position_offset must not be negative, got -1"),
     ({"style": "neox"}, "style='neox' is unknown; use one of 'half', 'interleaved'"),
     ({"layout": "sbhd"}, "layout='sbhd' is unknown"), ({"packing": "none"}, "packing='none' is unknown"),
     ({"kv_heads": 3}, "multiple of kv_heads")],
)  # fmt: skip
def test_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        RotaryEmbedding(**{"head_dim": 8, "heads": 4, **arguments})
    for name, value in (*((name, 4.0) for name in ("head_dim", "rotary_dim", "position_offset")), ("base", "1e4")):
        with pytest.raises(TypeError, match=f"takes a (whole )?number as {name}, got"):
            RotaryEmbedding(**{"head_dim": 8, "heads": 4, name: value})


def test_infer():
    op, _ = make()
    good = Spec((7, 2, 64), torch.bfloat16, torch.device("cpu"))
    assert op.infer(good) == good
    with pytest.raises(ValueError, match=r"RotaryEmbedding takes packed .* = 64 features, got 65"):
        op.infer(Spec((7, 2, 65), torch.float32, torch.device("cpu")))
    with pytest.raises(ValueError, match="got 2 dimensions"):
        op.infer(Spec((7, 64), torch.float32, torch.device("cpu")))
    with pytest.raises(TypeError, match="convert the input"):
        op.infer(Spec((7, 2, 64), torch.int32, torch.device("cpu")))
