"""Rotary embedding against complex numbers, in every layout, packing and style; by angles of the call, against it."""

from __future__ import annotations

import itertools

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.ops import rotary_embedding
from te_fuser.ops.base import OpCall
from te_fuser.ops.rotary_embedding import RotaryEmbedding, rotation_table
from tests.ops.check import normal, spec
from tests.refused import raises

LAYOUTS = ("sequence_first", "batch_first")
PACKINGS = ("interleaved", "blocked")
STYLES = ("half", "interleaved")
SAMPLES, POSITIONS = 2, 7


def turned_by_hand(op, x, direction=1):
    """Pair by pair: (a, b) as a + b i, times exp(i angle), for all heads but the values'."""
    heads, groups, dim, turning = op.heads, op.kv_heads, op.head_dim, op.rotary_dim
    per_group = heads // groups
    if op.packing == "blocked":
        starts = range(heads + groups)
    else:
        starts = [g * (per_group + 2) + r for g in range(groups) for r in range(per_group + 1)]
    y = x.clone()
    positions = torch.arange(POSITIONS, dtype=torch.float64) + op.position_offset
    positions = positions[:, None] if op.layout == "sequence_first" else positions
    for first, pair in itertools.product(starts, range(turning // 2)):
        one, two = (2 * pair, 2 * pair + 1) if op.style == "interleaved" else (pair, pair + turning // 2)
        one, two = first * dim + one, first * dim + two
        angles = direction * positions * op.base ** (-2 * pair / turning)
        numbers = torch.complex(x[..., one], x[..., two]) * torch.exp(1j * angles)
        y[..., one], y[..., two] = numbers.real, numbers.imag
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


def test_the_table_is_shared_made_anew_and_not_in_the_state():
    device = torch.device("cpu")
    small = rotation_table(((0, 5),), 8, 10000.0, torch.float32, device)
    large = rotation_table(((1, 7),), 8, 10000.0, torch.float32, device)
    assert small[0].data_ptr() == large[0].data_ptr() - 4 * 4
    assert small[0].shape == (5, 4) and large[1].shape == (7, 4)
    op, x = make()
    before = op.revision
    op.op_forward(OpCall(), x)
    assert not op.state_dict() and op.revision == before
    op, x = make()
    op.op_forward(OpCall(), x)
    op.base, op.position_offset = 50.0, 3
    torch.testing.assert_close(op.op_forward(OpCall(), x), turned_by_hand(op, x))
    rotary_embedding._table.clear()
    op, x = make()
    with torch.inference_mode():
        op.op_forward(OpCall(), x)
    op.reference(OpCall(), x.requires_grad_()).sum().backward()


def test_a_table_made_in_a_capture_is_not_handed_out_later(monkeypatch):
    """Tables of a capture lie in the graph's memory and are filled by replays alone; one that a graph reads is kept."""
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
    raises(ValueError, words, RotaryEmbedding, **{"head_dim": 8, "heads": 4, **arguments})
    for name, value in (*((name, 4.0) for name in ("head_dim", "rotary_dim", "position_offset")), ("base", "1e4")):
        with pytest.raises(TypeError, match=f"takes a (whole )?number as {name}, got"):
            RotaryEmbedding(**{"head_dim": 8, "heads": 4, name: value})


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
    raises(ValueError, r"ends are whole numbers \[sequences \+ 1\], got none", model, x, rotary_pos_emb=angles)
    raises(ValueError, "takes offsets, and no other does", ops.RotaryByAngles, D, layout="tokens", heads=2)


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
    raises(ValueError, "was made for 16 features, got 8", model, x[..., :8], rotary_pos_emb=torch.zeros(S, 1, 1, D))
    with pytest.raises(ValueError, match="cosines and sines together"):
        te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, cos_sin=("c", "s")))(x, c=torch.zeros(S, 1, 1, D))
    op, _ = make()
    good = spec(7, 2, 64, dtype=torch.bfloat16)
    assert op.infer(good) == good
    raises(ValueError, r"RotaryEmbedding takes packed .* = 64 features, got 65", op.infer, spec(7, 2, 65))
    raises(ValueError, "got 2 dimensions", op.infer, spec(7, 64))
    raises(TypeError, "convert the input", op.infer, spec(7, 2, 64, dtype=torch.int32))


def test_positions_behind_the_angles() -> None:
    """Refused on a CPU, where they are no padding."""
    x, angles, starts = normal(S, B, 2 * D), angles_of("half"), torch.tensor([0, 2])
    model = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, starts="first"))
    words = (
        "row 5 of sample 1 stands at position 7, and there are angles of 7 positions: give more of them, or lower first"
    )
    raises(ValueError, words, model, x, rotary_pos_emb=angles, first=starts)
    with pytest.raises(ValueError, match="row 0 of sample 0 stands at position -1"):
        model(x, rotary_pos_emb=angles, first=torch.tensor([-1, 0]))
    padded = te_fuser.Sequential(ops.RotaryByAngles(D, heads=2, starts="first", padded=True))
    longer = torch.cat((angles, angles[-1:].expand(2, -1, -1, -1)))
    torch.testing.assert_close(
        gradients(padded, x, rotary_pos_emb=angles, first=starts),
        gradients(model, x, rotary_pos_emb=longer, first=starts),
    )
    model = te_fuser.Sequential(ops.RotaryByAngles(D, layout="tokens", offsets="ends", starts="first", heads=2))
    x, angles, ends = normal(9, 2 * D), angles_of("half", length=9), torch.tensor([0, 4, 9])
    model(x, rotary_pos_emb=angles, ends=ends, first=torch.tensor([5, 4]))
    with pytest.raises(ValueError, match="row 3 stands at position 9, and there are angles of 9 positions"):
        model(x, rotary_pos_emb=angles, ends=ends, first=torch.tensor([6, 4]))
