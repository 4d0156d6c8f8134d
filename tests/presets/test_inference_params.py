"""Decoding step by step with caches: as the whole sequence at once."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser.fuser import pipeline
from tests.presets.layers import layer
from tests.refused import raises
from tests.twins import tensor

F, L = 24, 9
Params = te_fuser.InferenceParams
TABLE = te_fuser.RotaryPositionEmbedding(6, device="cpu")(L)


def run(made: Any, x: torch.Tensor, params: Any, **call: Any) -> torch.Tensor:
    """A step on x [S, B, F], whatever the layer's order is."""
    lead = 0 if made.common.attn_input_format == "sbhd" else 1
    with torch.no_grad():
        return made(x.transpose(0, lead), inference_params=params, **call).transpose(0, lead)


def whole(made: Any, x: torch.Tensor, **call: Any) -> torch.Tensor:
    lead = 0 if made.common.attn_input_format == "sbhd" else 1
    return made(x.transpose(0, lead), **call).transpose(0, lead).detach()


KINDS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "fused": {"fuse_qkv_params": True, "num_gqa_groups": 2, "layer_number": 2},
    "batch_first": {"attn_input_format": "bshd", "rotary_pos_interleaved": True},
    "norms": {"qk_norm_type": "RMSNorm", "window_size": (3, 0)},
    "bert": {"apply_residual_connection_post_layernorm": True, "output_layernorm": True},
    "sinks": {"softmax_type": "learnable", "self_attn_mask_type": "padding_causal"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_as_the_whole(kind: str) -> None:
    keywords = KINDS[kind]
    made, x = layer(**keywords), tensor(L, 3, F, grad=False)
    causal = {"self_attn_mask_type": "causal"}
    for angles in (None if kind in ("gpt", "sinks") else TABLE, (TABLE, TABLE * 0.5)):
        want, params, at = whole(made, x, rotary_pos_emb=angles, **causal), Params(4, L), 0
        for count in (4, 1, 1, 3):
            params.pre_step(OrderedDict((n, count) for n in range(3)))
            y = run(made, x[at : at + count], params, rotary_pos_emb=angles)
            torch.testing.assert_close(y, want[at : at + count])
            at += count


def test_sequences_begin_end_and_change_places() -> None:
    """Each of another length, padded behind; what ended makes room."""
    made, text = layer(), {name: tensor(L, 1, F, grad=False, seed=k)[:, 0] for k, name in enumerate("abcd")}
    want = {name: whole(made, x[:, None], rotary_pos_emb=TABLE)[:, 0] for name, x in text.items()}
    params, done = Params(3, L), dict.fromkeys(text, 0)
    for step in (
        {"a": 3, "b": 5},
        {"a": 1, "b": 1, "c": 4},
        {"c": 2, "a": 1},
        {"d": 9, "c": 1},
        {"c": 1, "d": 0},
        {"a": 4},
    ):
        done |= {name: 0 for name in text if name not in step}
        params.pre_step(OrderedDict(step))
        x = torch.full((max(step.values()), len(step), F), 7.0, dtype=torch.float64)
        for row, (name, count) in enumerate(step.items()):
            x[:count, row] = text[name][done[name] : done[name] + count]
        y = run(made, x, params, rotary_pos_emb=TABLE)
        for row, (name, count) in enumerate(step.items()):
            torch.testing.assert_close(y[:count, row], want[name][done[name] : done[name] + count])
            done[name] += count


@pytest.mark.parametrize("make", [Params, SimpleNamespace])
def test_one_offset_for_all_as_megatron_has_it(make: Any) -> None:
    layers, x = [layer(layer_number=n) for n in (1, 2)], tensor(L, 4, F, grad=False)
    sizes = {"max_batch_size": 4, "max_sequence_length": L}
    others = {"sequence_len_offset": 0, "batch_size_offset": 0, "key_value_memory_dict": {}}
    params = make(**sizes) if make is Params else make(**sizes, **others)
    want = whole(layers[1], whole(layers[0], x))
    for first, count in ((0, 5), (5, 1), (6, 3)):
        params.sequence_len_offset = first
        for start in (0, 2):
            params.batch_size_offset = start
            h = x[first : first + count, start : start + 2]
            for made in layers:
                h = run(made, h, params, attention_mask=torch.ones(1, 1, L, L, dtype=torch.bool))
            torch.testing.assert_close(h, want[first : first + count, start : start + 2])
    assert sorted(params.key_value_memory_dict) == [1, 2]
    params.sequence_len_offset = 7
    with pytest.raises(ValueError, match=r"3 positions behind 7 \(sequence_len_offset\), and max_sequence_length=9"):
        run(layers[0], x[:3, :2], params)
    with pytest.raises(ValueError, match="6 samples, and max_batch_size=4"):
        params.batch_size_offset = 2
        run(layers[0], x[:1], params)


def test_decoders_keep_what_they_attend_to() -> None:
    made, x, memory = layer(layer_type="decoder"), tensor(L, 2, F, grad=False), tensor(5, 2, F, grad=False, seed=2)
    want, params = whole(made, x, encoder_output=memory), Params(2, L)
    for at in range(L):
        params.pre_step({0: 1, 1: 1})
        torch.testing.assert_close(run(made, x[at : at + 1], params, encoder_output=memory), want[at : at + 1])


def test_a_step_plans_nothing_anew_and_reads_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x, planned, params = layer(layer_number=1), tensor(1, 2, F, grad=False), [], Params(2, L)
    make_plan = pipeline.make_plan
    monkeypatch.setattr(pipeline, "make_plan", lambda *args: planned.append(1) or make_plan(*args))
    for step in range(L):
        params.pre_step({"a": 1, "b": int(step < 4)})
        if step == 1:
            memory = [t.data_ptr() for t in params.key_value_memory_dict[1]]
            for name in ("item", "tolist", "__int__", "__bool__", "__float__", "cpu"):
                monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("a value was read"))
        run(made, x, params, rotary_pos_emb=TABLE)
    assert len(planned) == 1
    assert memory == [t.data_ptr() for t in params.key_value_memory_dict[1]]


def test_lengths_stay_where_they_are() -> None:
    """So that a captured step goes on by them: the same call, with what `pre_step` has put there since."""
    made, x, params = layer(), tensor(L, 1, F, grad=False), Params(1, L)
    want = whole(made, x)
    params.pre_step({0: 1})
    run(made, x[:1], params)
    (lengths,) = params._lengths.values()
    for at in range(1, 4):
        params.pre_step({0: 1})
        torch.testing.assert_close(run(made, x[at : at + 1], params), want[at : at + 1])
        assert lengths.tolist() == [[at], [1], [at + 1]]
    assert params._lengths[x.device] is lengths
    params.reset()
    assert not params.sequences and not lengths[2].any()
    params.pre_step({1: L})
    torch.testing.assert_close(run(made, x, params), want)


def test_sizes_that_are_said_and_dtypes() -> None:
    made, x = layer(params_dtype=torch.float32), tensor(2, 2, F, dtype=torch.float32, grad=False)
    params = Params(2, L, num_heads_kv=4, head_dim_k=6, dtype=torch.float32, qkv_format="sbhd", max_ctx_len=L)
    params.pre_step({0: 2, 1: 2})
    torch.testing.assert_close(run(made, x, params), whole(made, x))
    with torch.autocast("cpu", torch.bfloat16):
        other = Params(2, L)
        other.pre_step({0: 2, 1: 2})
        torch.testing.assert_close(run(made, x, other), whole(made, x), rtol=0.05, atol=0.05)
    assert {t.dtype for pair in other.key_value_memory_dict.values() for t in pair} == {torch.bfloat16}
    twin = copy.deepcopy(params)
    twin.pre_step({0: 1, 1: 1})
    assert params.sequences == {0: 2, 1: 2}
    with pytest.raises(ValueError, match=r"InferenceParams\(num_heads_kv=2\), and MultiheadAttention has 4"):
        run(made, x, Params(2, L, num_heads_kv=2))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_a_copy_goes_on_by_itself(copied: Any) -> None:
    made, x, params = layer(layer_number=1), tensor(L, 2, F, grad=False), Params(2, L)
    want = whole(made, x)
    params.pre_step({0: 3, 1: 3})
    run(made, x[:3], params)
    twin = copied(params)
    twin.pre_step({0: 2, 1: 2})
    torch.testing.assert_close(run(made, x[3:5], twin), want[3:5])
    twin.pre_step({0: 1, 1: 1})
    torch.testing.assert_close(run(made, x[5:6], twin), want[5:6])


def test_what_is_refused() -> None:
    made, x, params = layer(), tensor(2, 2, F, grad=False), Params(2, L)
    raises(NotImplementedError, "is_paged asks for pages", Params, 2, L, is_paged=True)
    raises(TypeError, "takes no argument 'pages'", Params, 2, L, pages=3)
    params.pre_step({0: 8, 1: 2})
    words = r"told 2 sequences with 8 tokens at most, and the call has 2 samples of 2 .* room for 8 tokens or more"
    raises(ValueError, words, run, made, x, params)
    with pytest.raises(ValueError, match="has 1 samples of 2 .* give a row for each sequence, from 2 to 2, with room"):
        run(made, x[:, :1], params)
    params.pre_step({0: 1, 1: 2})
    with pytest.raises(ValueError, match="attn_mask_type='arbitrary' with inference_params"):
        run(made, x, params, self_attn_mask_type="arbitrary")
    with pytest.raises(ValueError, match="rotary_pos_emb has 2 positions, and sequences may have 9"):
        run(made, x, params, rotary_pos_emb=TABLE[:2])
    raises(TypeError, r"inference_params is te_fuser.InferenceParams or has max_batch_size", run, made, x, object())
    both = layer(layer_number=1), layer(layer_number=1, kv_channels=5)
    params = Params(2, L)
    params.pre_step({0: 2, 1: 2})
    run(both[0], x, params)
    raises(ValueError, "give each layer a layer_number of its own", run, both[1], x, params)


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ({0: 1, "a": 1, "b": 1}, ValueError,
         r"3 sequences, of which 2 are new \('a', 'b'\), and max_batch_size=2: leave"),
        (dict.fromkeys(range(2, 8), 1), ValueError, r"6 are new \(2, 3, 4, 5, ..\), and max_batch_size=2"),
        ({1: 1, 0: 2}, ValueError, "sequence 0 has 8 positions and would have 10 by 2 more, and max_sequence_length=9"),
        ({0: 1, "long": 10}, ValueError, "sequence 'long' is new and would have 10 by 10 more, .* leave it out to end"),
        ({0: -1}, ValueError, "sequence 0 continues by -1 tokens: give 0 or more"),
        ({0: 1.5}, TypeError, r"sequence 0 continues by 1.5 \(float\): give a whole number of tokens"),
        ({torch.tensor(0): 1}, TypeError,
         r"called by a tensor, .* call it by a number or a text, of tensors by .tolist"),
        ([0, 1], TypeError, "pre_step takes a dict, sequence -> how many tokens, got list"),
    ],
)  # fmt: skip
def test_steps_that_are_refused_change_nothing(step: Any, error: type[Exception], words: str) -> None:
    params = Params(2, L)
    params.pre_step({0: 8, 1: torch.tensor(2)})
    raises(error, words, params.pre_step, step)
    assert params.sequences == {0: 8, 1: 2} and params._steps == [8, 2]


def test_steps_without_a_sequence_or_its_caches() -> None:
    """All have ended: a call has nothing to go on with, until it is said or all is reset."""
    made, x, params = layer(), tensor(2, 2, F, grad=False), Params(2, L)
    params.pre_step({0: 2, 1: 2})
    want = run(made, x, params)
    params.pre_step({})
    assert not params.sequences
    words = r"pre_step was told no sequence, and the call has 2 samples: name them, or reset"
    raises(ValueError, words, run, made, x, params)
    params.reset()
    torch.testing.assert_close(run(made, x, params), want)
    # A layer that no earlier step went through, as a copy of one without a number is.
    made, x, params = layer(), tensor(L, 2, F, grad=False), Params(2, L)
    params.pre_step({0: 3, 1: 3})
    run(made, x[:3], params)
    params.pre_step({0: 1, 1: 1})
    raises(ValueError, "no earlier step has caches of this layer", run, copy.deepcopy(made), x[3:4], params)
    torch.testing.assert_close(run(made, x[3:4], params), whole(made, x)[3:4])


@pytest.mark.parametrize("steps", [True, False])
def test_two_attentions_of_one_number_in_a_step(steps: bool) -> None:
    """Two attentions would write over each other's keys; one attention may run again, as before it is captured."""
    x, params = tensor(2, 2, F, grad=False), Params(2, L)
    both = layer(layer_number=1), layer(layer_number=1)
    if steps:
        params.pre_step({0: 2, 1: 2})
    y = run(both[0], x, params)
    with pytest.raises(ValueError, match="layer_number=1 is that of another attention, too, which wrote .* in this st"):
        run(both[1], x, params)
    torch.testing.assert_close(run(both[0], x, params), y)
    params.reset()
    run(both[1], x, params)
    copy.deepcopy(params), pickle.dumps(params)


def test_rows_behind_the_sequences_are_padding() -> None:
    """So a step may be one of max_batch_size rows whatever there is; a sequence that begins there later is right."""
    made, x, params = layer(), tensor(L, 3, F, grad=False), Params(3, L)
    want = whole(made, x)
    params.pre_step({"a": 2})
    torch.testing.assert_close(run(made, x[:2], params)[:, :1], want[:2, :1])
    params.pre_step({"a": 1, "b": 3})
    moved = torch.cat((torch.cat((x[2:3, :1], x[:2, :1])), x[:3, 1:]), 1)
    y = run(made, moved, params)
    torch.testing.assert_close(y[:1, 0], want[2:3, 0])
    torch.testing.assert_close(y[:, 1], want[:3, 1])


def as_it_was(params: Any) -> None:
    """Nothing is said: by steps a sequence that is not named has ended."""


BROKEN: dict[str, tuple[bool, Any]] = {
    "a reset": (True, Params.reset),
    "another sequence": (True, as_it_was),
    "offsets, a reset, steps": (False, Params.reset),
    "offsets, then steps": (False, as_it_was),
}


@pytest.mark.parametrize(("order", "value"), [("sbhd", torch.nan), ("bshd", torch.inf)])
@pytest.mark.parametrize("how", BROKEN)
def test_nothing_of_a_sequence_that_ended_stays(how: str, order: str, value: float) -> None:
    """Neither where it was nor in the row of another that moved up; in no row beside it."""
    made, x, (by_steps, between) = layer(attn_input_format=order), tensor(L, 3, F, grad=False), BROKEN[how]
    want, broken, params = whole(made, x), x.clone(), Params(3, L)
    broken[3:, 0] = value
    if by_steps:
        params.pre_step({"broken": 7, "other": 2, "third": 7})
    torch.testing.assert_close(run(made, broken[:7], params)[:2, 1], want[:2, 1])
    between(params)
    moved = by_steps and how != "a reset"
    params.pre_step({"other": 1, "new": 2} if moved else {"new": 2})
    rows = torch.stack((x[2:4, 1], x[:2, 2]), 1) if moved else x[:2, 2:]
    y = run(made, rows, params)
    torch.testing.assert_close(y[:, -1], want[:2, 2])
    if moved:
        torch.testing.assert_close(y[0, 0], want[2, 1])
    assert all(t.isfinite().all() for pair in params.key_value_memory_dict.values() for t in pair)
    params.pre_step({"new": 3, "later": 5})
    torch.testing.assert_close(run(made, torch.stack((x[2:7, 2], x[:5, 0]), 1), params)[:3, 0], want[2:5, 2])


@pytest.mark.parametrize("make", [Params, SimpleNamespace])
def test_an_offset_that_goes_back_leaves_nothing_behind(make: Any) -> None:
    """To the first position or a later one, in the rows of a call alone; caches may be another's."""
    made, x = layer(layer_number=1), tensor(L, 3, F, grad=False)
    others = {"sequence_len_offset": 0, "batch_size_offset": 0, "key_value_memory_dict": {}}
    params = make(max_batch_size=3, max_sequence_length=L, **({} if make is Params else others))
    want, broken = whole(made, x), x.clone()
    broken[2:, :2] = torch.nan
    for first, count, rows, given in ((0, 8, slice(0, 3), broken), (2, 1, slice(0, 2), x), (0, 2, slice(0, 1), x)):
        params.sequence_len_offset, params.batch_size_offset = first, rows.start
        y = run(made, given[first : first + count, rows], params)
        assert given is broken or y.isfinite().all()
    torch.testing.assert_close(y, want[:2, :1])
    params.sequence_len_offset, params.batch_size_offset = 8, 2
    torch.testing.assert_close(run(made, x[8:, 2:], params), want[8:, 2:])
    keys, values = params.key_value_memory_dict[1]
    params.key_value_memory_dict[1] = tuple(
        t.clone().index_fill_(0, torch.arange(4, 9), torch.nan) for t in (keys, values)
    )
    params.sequence_len_offset, params.batch_size_offset = 3, 0
    assert not run(made, x[3:4, :1], params).isnan().any()
    if make is Params:
        params.pre_step({0: 2})
        torch.testing.assert_close(run(made, x[:2, :1], params), want[:2, :1])
        params.reset()
        torch.testing.assert_close(run(made, x[:2, :1], params), want[:2, :1])


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
def test_what_padding_holds_reaches_nobody(order: str) -> None:
    """NaN behind the tokens of a prompt, and in rows behind the sequences."""
    made, x, params = layer(attn_input_format=order), tensor(L, 3, F, grad=False), Params(3, L)
    want, broken = whole(made, x), x.clone()
    broken[2:, 1] = broken[:, 2] = torch.nan
    params.pre_step({"a": 5, "b": 2})
    y = run(made, broken[:5], params)
    torch.testing.assert_close(y[:5, 0], want[:5, 0])
    torch.testing.assert_close(y[:2, 1], want[:2, 1])
    params.pre_step({"a": 1, "b": 1, "c": 0})
    y = run(made, torch.cat((x[5:6, :1], x[2:3, 1:2], broken[:1, 2:]), 1), params)
    torch.testing.assert_close(y[0, :2], torch.stack((want[5, 0], want[2, 1])))
