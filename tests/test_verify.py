"""Verification finds what is wrong, and passes what is right."""

from __future__ import annotations

import dataclasses
import io
import itertools
import re
import sys
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.codegen.compiler import find_compiler
from te_fuser.compare import same_bits
from te_fuser.formula.random import threshold
from te_fuser.fusions import Cost, Details, Fusion, fusion, registry
from te_fuser.verify import VerificationError, VerifyReport, models, verify
from te_fuser.verify import fusions as verify_fusions
from te_fuser.verify.examples import Case, example_cases, examples
from tests.recorded import recorded
from tests.twins import randomize
from tests.verify.wrong_fusions import WrongFactor

pytestmark = pytest.mark.usefixtures("few_rows")  # sizes are asked for in verify/test_steps.py
# Of verify's three dtypes, the one that is cheapest and the one that is hardest.
DTYPES = (torch.float32, torch.bfloat16)


def check(subject: Any, **options: Any) -> VerifyReport:
    return verify(subject, **{"dtypes": DTYPES[:1], "kernels": "reference", "device": "cpu", **options})


# ---------------------------------------------------------------------------------------------- right fusions


@fusion(forward=[ops.Bias, ops.ReLU], emits=["0.output"], details=Details(registered=False))
def bias_relu(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = x + m[0].bias
    m.emit("0.output", y)
    return torch.relu(y)


@fusion(backward=[ops.Bias, ops.ReLU], reads=["output"], details=Details(registered=False))
def bias_relu_backward(m: Any, dy: torch.Tensor) -> Any:
    dx = dy * (m["output"] > 0)
    return dx, {"0.bias": dx.reshape(-1, dx.shape[-1]).sum(0)} if m.needs("0.bias") else {}


def drawn(m: Any, like: torch.Tensor) -> torch.Tensor:
    """Factors of dropout."""
    rows = like.reshape(-1, like.shape[-1])
    return m.random(0).mask(rows, threshold(m[0].op.p), False).reshape(like.shape) / (1 - m[0].op.p)


def draws(m: Any) -> bool | str:
    return m[0].op.draws() or "dropout is off"


@fusion(joint=[ops.Dropout, ops.SiLU], saves=["kept", "gate"], when=draws, details=Details(registered=False))
class dropout_silu:
    @staticmethod
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        kept = x * drawn(m, x)
        gate = torch.sigmoid(kept)
        m.emit("kept", kept)
        m.emit("gate", gate)
        return kept * gate

    @staticmethod
    def backward(m: Any, dy: torch.Tensor) -> torch.Tensor:
        kept, gate = m["kept"], m["gate"]
        return dy * (gate + kept * gate * (1 - gate)) * drawn(m, dy)


@pytest.mark.parametrize("entry", [bias_relu, bias_relu_backward, dropout_silu], ids=lambda f: f.name)
def test_right_fusion_passes(entry: Fusion) -> None:
    report = check(entry, dtypes=DTYPES)
    assert report.passed and report.rows
    assert entry.name in str(report)
    assert len({(row.case, row.tensor) for row in report.rows}) == len(report.rows)


# Fusions that verify makes up nothing for, or not as they are meant: they have tests of their own.
NOT_MADE_UP = ("attention", "quantized_matmul", "float8_matmul", "partly_float8", "own_scales", "key_value_cache")
NOT_MADE_UP += ("one_query_attention", "turned_heads_backward")


def test_every_built_in_fusion_that_runs_here_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that no case of its first list takes says why; of the others there are all cases."""

    def three_cases(*given: Any) -> list[Case]:
        return [c for c in example_cases(*given) if c.leading in ((7,), (3, 11)) or c.frozen == "all"]

    ran = []
    for name in te_fuser.fusions.names():
        if name in registry._OWN or name.startswith(NOT_MADE_UP):
            continue
        try:
            with monkeypatch.context() as patch:
                patch.setattr(verify_fusions, "examples", lambda *given: itertools.islice(examples(*given), 1))
                patch.setattr(verify_fusions, "example_cases", three_cases)
                check(name, dtypes=DTYPES[1:])
        except VerificationError as error:
            reasons = ("on cuda, the input is on cpu", "accumulate_into_main_grad is off", "an epilogue drops nothing")
            assert any(reason in str(error) for reason in reasons), error
        else:
            ran.append(name)
            assert check(name, dtypes=DTYPES).passed
    assert ran == ["matmul_bias"]


def test_a_name_stands_for_the_registered_fusion_and_verifying_leaves_the_registry_alone() -> None:
    te_fuser.fusions.register(bias_relu)
    before = te_fuser.fusions.names()
    assert check("bias_relu").passed and te_fuser.fusions.names() == before
    te_fuser.fusions.unregister("bias_relu")
    assert check(bias_relu).passed and "bias_relu" not in te_fuser.fusions.names()


# ---------------------------------------------------------------------------------------------- wrong fusions


@fusion(forward=[ops.Bias, ops.ReLU], emits=["0.output"], details=Details(registered=False))
def forgets_bias(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.emit("0.output", x)
    return torch.relu(x)


_RUNS = itertools.count()


def test_the_error_names_the_fusion() -> None:
    with pytest.raises(VerificationError, match=r"forgets_bias.*\n?.*output: error"):
        check(forgets_bias, dtypes=[torch.bfloat16])


def test_gradients_need_not_repeat_where_no_library_promises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @fusion(backward=[ops.Bias, ops.ReLU], reads=["output"], details=Details(registered=False))
    def trembling(m: Any, dy: torch.Tensor) -> Any:
        dx = dy * (m["output"] > 0) * (1 + 1.2e-7 * (next(_RUNS) % 2))
        return dx, {"0.bias": dx.reshape(-1, dx.shape[-1]).sum(0)} if m.needs("0.bias") else {}

    def notes() -> list[str]:
        report = check(trembling, raise_on_failure=False)
        return [str(row) for row in report.failures if "not repeated" in str(row)]

    assert notes()
    monkeypatch.setattr(models, "gradients_repeat", lambda model, device: False)
    assert not notes()


def test_attention_on_a_gpu_repeats_its_gradients_only_when_asked() -> None:
    attention = te_fuser.Sequential(
        te_fuser.Residual(ops.DotProductAttention(1, 8, mask="none", layout="sequence_first"), ops.Linear(8, 24))
    )
    norm, gpu = te_fuser.Sequential(ops.LayerNorm(8)), torch.device("cuda")
    assert models.gradients_repeat(norm, gpu) and models.gradients_repeat(attention, torch.device("cpu"))
    assert not models.gradients_repeat(attention, gpu)
    torch.use_deterministic_algorithms(True)
    try:
        assert models.gradients_repeat(attention, gpu)
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_ignored_argument_is_found() -> None:
    @fusion(forward=[ops.LayerNorm], details=Details(registered=False))
    def plain_layer_norm(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], m[0].weight, m[0].bias, m[0].eps)

    with pytest.raises(VerificationError, match="zero_centered_gamma=True"):
        check(plain_layer_norm)


def test_a_fusion_that_is_never_taken_says_why() -> None:
    @fusion(forward=[ops.Bias, ops.ReLU], when=lambda m: "only on Sundays", details=Details(registered=False))
    def sunday(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    with pytest.raises(VerificationError, match="never taken.*\n  only on Sundays"):
        check(sunday)


def test_an_expensive_fusion_is_verified_all_the_same() -> None:
    @fusion(forward=[ops.Bias], cost=lambda m: Cost(seconds=10.0), details=Details(registered=False))
    def dear_bias(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x + m[0].bias

    assert check(dear_bias).passed


def test_ops_can_be_given() -> None:
    class Twice(ops.RowOp):
        def __init__(self, how: object) -> None:
            super().__init__()

        def compute(self, x: Any) -> Any:
            return x * 2.0

    @fusion(forward=[Twice], details=Details(registered=False))
    def twice(m: Any, x: torch.Tensor) -> torch.Tensor:
        return x + x

    with pytest.raises(ValueError, match=r"cannot make a Twice.*'how'.*by @example\(\.\.\.\) .*verify\(fusion, ops="):
        check(twice)
    assert check(twice, ops=[[Twice(1)]]).passed


def test_what_cannot_be_verified() -> None:
    entry = fusion(forward=[ops.GELU], name="mine", details=Details(registered=False))(lambda m, x: x)
    for lists in ([], [ops.GELU()]):
        with pytest.raises(TypeError, match=r"ops are lists of ops, verify\(fusion, ops=\[\[MatMul"):
            te_fuser.verify(entry, ops=lists)  # type: ignore[arg-type]
    for wrong, said in ((ops.GELU, "the class GELU: make one"), (torch.nn.Linear(3, 3), "Linear")):
        with pytest.raises(TypeError, match=f"a Sequential, a preset or an op, got {said}"):
            te_fuser.verify(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outputs and named inputs are those of a call with x: give x"):
        te_fuser.verify(ops.GELU(), outputs=("before",))


# ------------------------------------------------------------------------------------------------------ models


def transformer_block(features: int = 16, **options: Any) -> te_fuser.Sequential:
    branch = ops.LayerNorm(features), ops.Linear(features, features), ops.GELU(), ops.Dropout(0.2)
    model = te_fuser.Sequential(te_fuser.Residual(*branch), ops.RMSNorm(features), **options)
    return randomize(model)


def test_models_are_verified() -> None:
    report = verify(transformer_block(kernels="reference"))
    assert report.passed
    cases = {row.case for row in report.rows}
    assert {"float64 [33, features]", "bfloat16 [17, features], gradient of stride 0"} <= cases
    tensors = {row.tensor for row in report.rows}
    assert {"output", "gradient of input", "gradient of 0.0.weight", "gradient of 1.weight"} <= tensors


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_float64_copies_of_a_model_that_asks_for_generated_kernels_run() -> None:
    report = te_fuser.verify(te_fuser.Sequential(ops.LayerNorm(6), kernels="generated"))
    assert {row.case.split()[0] for row in report.rows} == {"float32", "bfloat16", "float64"} and not report.skipped


def test_a_given_input_and_named_inputs() -> None:
    model = te_fuser.Sequential(
        ops.Output("first"), ops.AdaptiveLayerNorm(8, batch_dim=1), ops.Add("skip"), kernels="reference"
    )
    x, skip = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    report = verify(model, x, outputs=("first",), scale=torch.randn(3, 8), shift=torch.randn(3, 8), skip=skip)
    tensors = {row.tensor for row in report.rows}
    assert {"output 'first'", "gradient of input skip", "gradient of input scale"} <= tensors


def test_named_inputs_are_made_up() -> None:
    model = te_fuser.Sequential(ops.AdaptiveLayerNorm(8, batch_dim=0), ops.Add("skip"), kernels="reference")
    assert {"gradient of input scale", "gradient of input skip"} <= {row.tensor for row in check(model).rows}


def test_the_model_is_left_as_it_was() -> None:
    model = transformer_block(kernels="reference").eval()
    model[1].weight.requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    state = torch.get_rng_state()
    check(model)
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training and not model[1].weight.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert all(same_bits(p, before[name]) for name, p in model.state_dict().items())


def test_another_default_device() -> None:
    """Draws and results on the way lie where the model does."""
    listed = ops.AdaptiveLayerNorm(8, batch_dim=0), ops.Linear(8, 8), ops.Dropout(0.25)
    model = randomize(te_fuser.Sequential(*listed, kernels="reference")).float()
    x, scale, shift = (torch.randn(5, 8, requires_grad=True) for _ in range(3))
    watched = te_fuser.Sequential(*model, kernels="reference", verify=True)
    with torch.device("meta"):
        assert check(model).passed
        watched(x, scale=scale, shift=shift).sum().backward()
    assert all(t.grad.device.type == "cpu" for t in (x, scale, shift))


def test_ops_that_are_bound_to_a_module_outside_the_model() -> None:
    class Mlp(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))
            self.bias = torch.nn.Parameter(torch.randn(8))
            weight = ops.Bound(ops.MatMul(8, 8, device="meta"), self, weight="weight")
            self.body = te_fuser.Sequential(ops.LayerNorm(8), weight, ops.Bound(ops.Bias(8), self, bias="bias"))

    mlp = Mlp()
    report = te_fuser.verify(mlp.body, torch.randn(3, 8))
    assert report.rows[0].case == "float32 [3, 8]"
    assert {f"gradient of {name}" for name in ("0.0.weight", "1.weight", "1.bias")} < {r.tensor for r in report.rows}
    assert te_fuser.verify(mlp.body, dtypes=[torch.bfloat16]).passed


def test_ids_stay_ids() -> None:
    model = te_fuser.Sequential(torch.nn.Embedding(5, 8), ops.LayerNorm(8))
    assert te_fuser.verify(model, torch.tensor([[4, 0, 2]])).passed


def test_plain_modules_between_ops() -> None:
    model = te_fuser.Sequential(ops.Linear(8, 8), torch.nn.Tanh(), ops.LayerNorm(8), kernels="reference")
    assert check(randomize(model)).passed


def test_plain_modules_that_look_at_values() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2.0 if x.isfinite().all() else x

    model = te_fuser.Sequential(ops.Linear(8, 8), Branch(), ops.LayerNorm(8))
    with recorded():
        assert te_fuser.verify(model, torch.randn(3, 8)).passed


def test_a_model_that_takes_no_example_says_so() -> None:
    model = te_fuser.Sequential(
        ops.DotProductAttention(2, 4, mask="given", layout="sequence_first"), kernels="reference"
    )
    with pytest.raises(VerificationError, match="attention_mask"):
        verify(model)


def test_a_report_is_a_line_where_all_passes_and_its_table_has_all_cases() -> None:
    report = check(te_fuser.Sequential(ops.LayerNorm(8)))
    cases = {row.case for row in report.rows}
    line = f"Sequential: {len(report.rows)} checks passed, in {len(cases)} cases; report.table() shows them"
    assert str(report) == repr(report) == line
    assert all(case in report.table() for case in cases)
    report = dataclasses.replace(report, skipped=[("a", "why"), ("b", "how"), ("c", "how")])
    assert f"in {len(cases)} cases, 3 not run (why and 1 more); report.table() shows them" in str(report)
    text = report.table()
    assert re.search(r"a  .*not run: why", text) and re.search(r"b and 1 more .*not run: how", text)


def test_a_failure_is_told_by_the_simplest_case_first() -> None:
    report = check(WrongFactor(), dtypes=DTYPES, raise_on_failure=False)
    first = next(row for row in report.rows if not row.passed)
    assert first.case == "float32 [1, features]"  # of no variant
    lines = str(report).splitlines()
    failed = len(report.failures)
    assert str(report.error()) == f"WrongFactor: {first} (and {failed - 1} more of {len(report.rows)} checks)"
    assert lines[0].startswith(f"WrongFactor: {failed} of {len(report.rows)} checks failed") and len(lines) == 7
    assert lines[1].strip() == str(first) and lines[-1].strip() == f"... and {failed - 5} more"
    assert "failed" in report.table()


# ------------------------------------------------------------------------------------------ what it says meanwhile


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("subject", [bias_relu, te_fuser.Sequential(ops.Bias(8))])
@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_shows_the_case_that_runs(
    stream: type[io.StringIO], subject: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = stream()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", shown)
    report = check(subject)
    assert report.passed and not capsys.readouterr().out
    title, case = report.title, report.rows[0].case
    assert (f"verify {title}, case 1: {case}"[:60] in shown.getvalue()) == (stream is Terminal)
    assert bool(shown.getvalue()) == (stream is Terminal)


def test_rounding_is_said_to_be_rounding() -> None:
    @fusion(forward=[ops.Bias, ops.SiLU], details=Details(registered=False))
    def narrow(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = (x + m[0].bias).float()
        return (y * torch.sigmoid(y)).to(x.dtype)

    assert check(narrow).passed
    with pytest.raises(VerificationError, match=r"float64 .*; this looks like rounding to float32 rather than a wrong"):
        check(narrow, dtypes=[torch.float64])
