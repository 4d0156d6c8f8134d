"""explain(): what it says is what the plan holds, in text that fits the page."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.show.step_rows import step_rows


def mlp(**options: Any) -> te_fuser.Sequential:
    return te_fuser.Sequential(
        te_fuser.Residual(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16), ops.Dropout(0.1)),
        **{"kernels": "reference", **options},
    )


def sample() -> torch.Tensor:
    return torch.randn(6, 3, 16, requires_grad=True)


def section(text: str, title: str) -> str:
    """The lines below a title, up to the next empty one."""
    return text.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0]


def test_text_is_plain_and_fits() -> None:
    model = te_fuser.Sequential(*(mlp() for _ in range(3)))
    for text in (str(model.explain(sample(), details=True)), str(model.explain(sample(), device="h200", details=True))):
        assert max(map(len, text.splitlines())) <= 110
        assert "\x1b" not in text
        assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("columns", [20, 110, 160, 400])
def test_names_stay_whole_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of ops, names of steps and of what they keep: each can be searched for and copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with torch.device("meta"):
        layer = te_fuser.TransformerLayer(64, 256, 4, params_dtype=torch.bfloat16)
        model = te_fuser.Sequential(OrderedDict(decoder_of_the_model=layer))
        x = torch.empty(32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    explanation = model.explain(x, device="h200", details=True)
    (plan,) = explanation.plans
    text = str(explanation)
    for direction in ("forward", "backward"):
        words = set(section(text, direction.capitalize()).replace(",", "").split())
        for row in step_rows(plan, direction):
            names = {word for named in (*row.covers, *row.keeps, *row.again) for word in named.split()}
            assert {row.name, *names} <= words
            assert f" {row.seconds * 1e6:.1f} {row.limit}" in text
    assert columns > 110 or max(map(len, text.splitlines())) < 150
    assert columns < 160 or max(map(len, text.splitlines())) <= columns
    assert all(whole in section(text, "Totals") for whole in ("predicted bytes", "host ms", "launches"))


@pytest.mark.parametrize("measure", [False, True])
def test_without_details_a_step_is_a_line(measure: bool) -> None:
    model = te_fuser.Sequential(*(mlp()[0] for _ in range(3)), kernels="reference")
    explanation = model.explain(sample(), measure=measure)
    text, (plan,) = str(explanation), explanation.plans
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80 and "\x1b" not in text
    for direction in ("forward", "backward"):
        rows = step_rows(plan, direction)
        for row in rows:
            assert any(row.name in line.split() for line in lines), row.name
        (total,) = [line for line in lines if line.startswith(f"{direction:8} ")]
        assert f"{plan.seconds(direction) * 1e3:.3f} ms predicted" in total
        assert ("ms measured" in total) is measure
        assert f"{sum(row.launches for row in rows)} launches" in total
    assert any("times more" in line or "once more" in line for line in lines)
    assert f"{len({r.name for r in plan.refusals})} fusions considered and not taken" in text
    assert str(model.explain(sample(), details=True)) != text


def test_without_details_a_layer_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with torch.device("meta"):
        layer = te_fuser.TransformerLayer(1024, 4096, 16, params_dtype=torch.bfloat16)
        x = torch.empty(128, 8, 1024, dtype=torch.bfloat16, requires_grad=True)
    lines = str(layer.explain(x, device="h200")).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    wide = str(layer.explain(x, device="h200"))  # which has room for the ops, whole
    assert "MatMul layernorm_mlp.1, Bias layernorm_mlp.2, GELU layernorm_mlp.3" in wide
    with torch.no_grad():
        assert "No backward: nothing in this call needs a gradient." in str(layer.explain(x.detach(), device="h200"))


def test_a_direction_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty direction takes no room from ops' names; a forward that runs nothing is no missing backward."""
    monkeypatch.setenv("COLUMNS", "100")
    with torch.no_grad():
        lines = str(mlp().explain(sample(), measure=True)).splitlines()
    assert max(map(len, lines)) <= 100 and any("LayerNorm 0.0" in line for line in lines)
    assert "" not in lines
    text = str(te_fuser.Sequential(ops.Dropout(0.0)).explain(sample()))
    assert "Backward" in text and "Forward" not in text and "No backward" not in text
    assert "No backward" in str(te_fuser.Sequential().explain(sample()))


def test_repeated_layers_are_shown_once() -> None:
    few, many = (te_fuser.Sequential(*(mlp() for _ in range(n)), kernels="reference") for n in (4, 24))
    short, long = (str(m.explain(sample(), details=True)) for m in (few, many))
    assert len(long.splitlines()) <= len(short.splitlines()) + 4
    assert "... the same 4 steps 22 times more" in long
    assert len(step_rows(many.plan(sample()), "forward")) > 24


@pytest.mark.parametrize(
    ("device", "kernels", "word"), [("h200", "auto", "__global__"), ("cpu", "reference", "  load  ")]
)
def test_source_of_each_distinct_kernel(device: str, kernels: str, word: str) -> None:
    model = te_fuser.Sequential(mlp(kernels=kernels), mlp(kernels=kernels), kernels=kernels)
    explanation = model.explain(sample(), device=device, source=True, details=True)
    sources = explanation.sources()
    plan = explanation.plans[0]
    keys = plan.generated
    assert len(sources) == len(keys) and all(word in text for text in sources.values())
    printed = str(explanation)
    for text in sources.values():
        assert text.rstrip() in "\n".join(line.rstrip() for line in printed.splitlines())


def test_measuring_needs_the_device_at_hand() -> None:
    with pytest.raises(ValueError, match="leave out device='h200'"):
        mlp().explain(sample(), device="h200", measure=True, details=True)


def test_without_an_input_it_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"torch.empty of its shape will do"):
        mlp().explain(details=True)


def test_which_dimension_is_which_is_told_with_its_size() -> None:
    """Layouts and packings that could be misread are printed; equal ones once."""

    def block(**layout: Any) -> te_fuser.Residual:
        return te_fuser.Residual(
            ops.Linear(16, 32), ops.RotaryEmbedding(4, heads=4, kv_heads=2, **layout),
            ops.DotProductAttention(4, 4, kv_heads=2, **{"mask": "none", "layout": "sequence_first", **layout}),
        )  # fmt: skip

    x = torch.randn(2, 7, 16)
    text = " ".join(str(te_fuser.Sequential(block(), block(), kernels="reference").explain(x, details=True)).split())
    assert (
        "Layout: RotaryEmbedding 0.1 and 3 others like it read [sequence 2, batch 7, features 32] "
        "(layout='sequence_first'), features as 2 x [2 queries, a key, a value] of 4 (packing='interleaved')"
    ) in text
    page = te_fuser.Sequential(block(), kernels="reference").explain(x)._repr_html_()
    assert "Layout: RotaryEmbedding 0.1 and 1 other like it read [sequence 2, batch 7, features 32]" in page
    other = te_fuser.Sequential(block(layout="batch_first", packing="blocked"), kernels="reference")
    assert (
        "[batch 2, sequence 7, features 32] (layout='batch_first'), features as [4 queries | 2 keys | 2 values] of 4 "
        "(packing='blocked')"
    ) in " ".join(str(other.explain(x, details=True)).split())
    assert "Layout" not in str(mlp().explain(sample(), details=True))


class Own(te_fuser.Sequential):
    """A list with a call of its own."""

    def forward(self, x: torch.Tensor, **inputs: Any) -> Any:
        return super().forward(x, **inputs)


@pytest.mark.parametrize("measure", [False, True])
def test_what_runs_by_itself_is_named_in_its_place_with_the_reason(measure: bool) -> None:
    hooked = ops.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    model = te_fuser.Sequential(
        torch.nn.BatchNorm1d(3),
        ops.LayerNorm(16),
        te_fuser.Residual(torch.nn.Linear(16, 16), torch.nn.GELU()),
        ops.ReLU(),
        Own(ops.GELU()),
        hooked,
        kernels="reference",
    )
    text = str(model.explain(sample(), measure=measure, details=True))
    assert max(map(len, text.splitlines())) <= 110
    said, first = " ".join(text.split()), "By itself, fused with nothing:"
    convert = "no op; te_fuser.from_torch(module) makes"
    wanted = (
        f"{first} 0 (BatchNorm1d): {convert} none of it: te_fuser has no op for it Plan 1 of 2: 2 ops",
        f"{first} 2.0 (Linear), 2.1 (GELU): {convert} ops of it, with its parameters Plan 2 of 2: 2 ops",
        f"{first} 4 (Own): a call of its own {first} 5 (Linear): hooks of its own",
    )
    assert said.startswith(wanted[0]) and wanted[1] in said and said.endswith(wanted[2])


def test_a_list_of_plain_modules_alone_is_explained() -> None:
    model = te_fuser.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
    explanation = model.explain(sample(), details=True)
    assert not explanation.plans and "0 (LayerNorm), 1 (Linear): no op; te_fuser.from_torch(module)" in str(explanation)
