"""The verbs of te-fuser that take a model: explain, verify, bench; and doctor."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import cli, fusions, ops
from te_fuser.codegen import compiler

MODELS = """
import torch
import te_fuser
from te_fuser import ops
class Ids(torch.nn.Embedding):
    def forward(self, x):
        if x.is_floating_point():  # of fake tensors older releases of PyTorch take them
            raise TypeError("ids are whole numbers")
        return super().forward(x)
def build():
    return te_fuser.Sequential(ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8))
def plain():
    return torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.GELU())
def ids():
    return te_fuser.Sequential(Ids(5, 8), ops.LayerNorm(8))
def preset():
    print("made")
    return te_fuser.LayerNormLinear(8, 8, return_bias=True, device="cpu")
def of_meta():
    with torch.device("meta"):
        return build()
def two_inputs():
    return te_fuser.Sequential(ops.Linear(8, 8), ops.Add("skip"))
def of_size(size):
    return ops.Linear(size, size)
def ends():
    raise SystemExit(0)
def number():
    return 5
def convolution():
    return torch.nn.Conv2d(1, 1, 1)
def raising():
    made = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    made[1].register_forward_hook(lambda *_: int("mine"))
    return made
def in_bfloat16():
    return ids().bfloat16()
made = build()
"""


@pytest.fixture
def models(tmp_path: Path) -> str:
    (tmp_path / "some_models.py").write_text(MODELS)
    return str(tmp_path / "some_models.py")


@pytest.mark.parametrize("name", ["build", "made", "plain"])
def test_explain_prints_the_plans(name: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{models}:{name}", "--input", "3,5,8", "--device", "h200"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("Plan: ") and "input [3, 5, 8] float32, on h200" in told.out and "Backward" in told.out
    assert ("converted by te_fuser.from_torch" in told.err) == (name == "plain")


def test_explain_without_gradients_and_of_ids(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{models}:build", "--input", "3,8", "--inference", "--dtype", "bfloat16"]) == 0
    assert "No backward: nothing in this call needs a gradient." in capsys.readouterr().out
    assert cli.main(["explain", f"{models}:ids", "--input", "3,4", "--dtype", "int64"]) == 0
    assert "input [3, 4, 8] float32" in capsys.readouterr().out


def test_explain_as_data_and_as_a_page(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    assert cli.main(["explain", f"{models}:build", "--input", "3,8", "--json", "--html", str(page)]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    assert plan["forward"] and plan["backward"] and plan["kept_bytes"] > 0 and plan["device"]
    assert {"step", "kind", "ops", "seconds", "read", "written", "limit", "share"} == plan["forward"][0].keys()
    assert all(refused["reason"] for refused in plan["refused"]) and plan["refused"]
    assert page.read_text().startswith("<!doctype html>")


def test_json_stands_alone_and_tells_of_modules_in_between(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The preset prints, and returns several values."""
    for verb, *more in (["explain"], ["bench", "--rounds", "1", "--no-compile"]):
        assert cli.main([verb, f"{models}:preset", "--input", "3,8", "--json", *more]) == 0
        told = capsys.readouterr()
        assert json.loads(told.out) and "made" in told.err
    assert cli.main(["explain", f"{models}:ids", "--input", "3,4", "--json"]) == 0  # no ids: nothing is known behind it
    found = json.loads(capsys.readouterr().out)
    assert not found["plans"] and "0 (Ids)" in found["by_itself"][0] and "'0' (Ids)" in found["unseen"]


def test_a_model_on_the_meta_device_is_planned_there(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"{models}:of_meta", "--input", f"{2**40},8"]
    assert cli.main(["explain", *given, "--device", "h200"]) == 0
    assert f"input [{2**40}, 8] float32, on h200" in capsys.readouterr().out
    assert cli.main(["verify", *given]) == 2
    assert "got a meta tensor, which has no values" in capsys.readouterr().err


def test_a_file_of_a_package_imports_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "some package" / "outer_of_models" / "inner"
    folder.mkdir(parents=True)
    for part in (folder, folder.parent):
        (part / "__init__.py").touch()
    (folder / "layers.py").write_text(MODELS)
    (folder / "model.py").write_text("from ..inner.layers import build")
    assert cli.main(["explain", f"{folder / 'model.py'}:build", "--input", "3,8"]) == 0


def test_a_script_with_arguments_and_dataclasses_is_imported(tmp_path: Path) -> None:
    lines = ("from __future__ import annotations", "import argparse, dataclasses", MODELS, "@dataclasses.dataclass")
    script = tmp_path / "script_of_models.py"
    script.write_text("\n".join((*lines, "class Sizes:", "    n: int", "argparse.ArgumentParser().parse_args()")))
    assert cli.main(["explain", f"{script}:build", "--input", "3,8"]) == 0


def test_verify_ends_with_what_it_found(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", f"{models}:build", "--input", "3,8"]) == 0
    assert "checks passed" in capsys.readouterr().out

    @te_fuser.fusion(forward=[ops.GELU], cost=lambda m: fusions.Cost(seconds=0.0))
    def wrong_gelu(m: fusions.Match, x: torch.Tensor) -> torch.Tensor:
        return x

    try:
        assert cli.main(["verify", f"{models}:build", "--input", "3,8", "--json"]) == 1
        found = json.loads(capsys.readouterr().out)
        assert not found["passed"] and "failed" in found["report"]
    finally:
        fusions.unregister("wrong_gelu")


def test_bench_times_all_ways(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", f"{models}:build", "--input", "3,8", "--rounds", "1", "--no-compile"]
    assert cli.main([*arguments, "--json", "--plot", str(tmp_path / "times.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["milliseconds"]) == ["eager", "te_fuser"] and min(found["milliseconds"].values()) > 0
    assert (tmp_path / "times.svg").stat().st_size > 1000
    assert cli.main([*arguments, "--inference"]) == 0
    assert "of te_fuser's" in capsys.readouterr().out


def test_what_torch_compile_cannot_do_is_left_out_by_name(
    models: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("no compiler\nhere")

    monkeypatch.setattr(torch, "compile", lambda model: refuse)
    assert cli.main(["bench", f"{models}:build", "--input", "3,8", "--rounds", "1"]) == 0
    assert "torch.compile  left out: RuntimeError: no compiler here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [("{models}:other", [], "has no 'other'"), ("nowhere.py:build", [], "there is no file nowhere.py"),
     ("no_such_package.x:build", [], "there is no module 'no_such_package.x'"),
     ("build", [], "'build' names no model: write file.py:name or package.module:name"),
     ("{models}:number", [], "gives int: name a torch.nn.Module, or what gives one"),
     ("{models}:convolution", [], "convolution, --input 3,8: TypeError: from_torch cannot turn Conv2d into ops"),
     ("{models}:build", ["--dtype", "number"], "--dtype number is no dtype of a model: give float32, bfloat16"),
     ("{models}:build", ["--dtype", "float8_e4m3fn"], "--dtype float8_e4m3fn is no dtype of a model: give float32"),
     ("{models}:plain", ["--dtype", "complex64"], "--dtype complex64 is no dtype of a model: give float32"),
     ("{models}:build", ["--device", "b9"], "b9"), (":build", [], "':build' names no model"),
     ("{models}:of_size", [], "takes arguments (missing a required argument: 'size'): name a function without"),
     ("{models}:ends", [], "ends the process, with status 0, before there is a model"),
     ("{models}:two_inputs", [], "reads 'skip', which no Fork before it binds"),
     ("{models}:build", ["--dtype", "int64"], "takes floating-point tensors, got int64"),
     ("{models}:build", ["--input", "3,8:number"], "--input 3,8: number is no dtype of a model"),
     ("{models}:build", ["--html", "no folder/plan.html"], "--html no folder/plan.html: No such file or directory")],
)  # fmt: skip
def test_wrong_words_are_answered_and_end_with_2(
    model: str, options: list[str], words: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["explain", model.format(models=models), "--input", "3,8", *options]
    assert cli.main(given) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.startswith("te-fuser explain: ") and not told.out


@pytest.mark.parametrize("sizes", ["3x8", "-3,8", "9" * 30, f"{2**60},8"])
def test_sizes_are_those_of_a_tensor(sizes: str, models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", f"{models}:build", f"--input={sizes}"]) == 2
    assert f"--input {sizes}: give sizes with commas between them, as 8,128,512" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--input", "3,7"], ["--rounds", "0"], ["--plot", "a.b"], ["--plot", "no/a.svg"]])
def test_bench_looks_before_it_runs(options: list[str], models: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", f"{models}:build", "--input", "3,8", "--no-compile", *options]) == 2
    assert capsys.readouterr().err.startswith("te-fuser bench: ")


def test_a_model_keeps_its_own_dtype(models: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{models}:in_bfloat16", "--input", "3,4:int64"]) == 0
    assert "input [3, 4, 8] bfloat16" in capsys.readouterr().out
    (tmp_path / "half.py").write_text(MODELS + "made.bfloat16()")
    for verb, *more in (["explain"], ["verify"], ["bench", "--rounds", "1", "--no-compile", "--plot", "times.svg"]):
        more = [word.replace("times", str(tmp_path / "times")) for word in more]
        assert cli.main([verb, f"{tmp_path / 'half.py'}:made", "--input", "3,8", *more]) == 0
        assert verb != "explain" or "input [3, 8] bfloat16" in capsys.readouterr().out
    assert "3,8 bfloat16" in (tmp_path / "times.svg").read_text()


@pytest.mark.parametrize("verb", ["explain", "verify", "bench"])
def test_an_error_of_ones_own_keeps_its_traceback(verb: str, models: str) -> None:
    with pytest.raises(ValueError, match="mine"):
        cli.main([verb, f"{models}:raising", "--input", "3,8"])


CONVERTED = """
import torch
import te_fuser
from te_fuser import ops
from tests.convert.models import model_of
def build():
    model = model_of("llama", torch.float32)
    te_fuser.convert(model)
    return model
def conversion():
    return te_fuser.convert(model_of("gpt2", torch.float32), check=False)
def emptied():
    made = conversion()
    te_fuser.revert(made.model)
    return made
def of_meta():
    return conversion().model.to("meta")
def adapted():
    model = build()
    mlp = model.model.layers[1].mlp
    mlp.up_proj = torch.nn.Sequential(mlp.up_proj, torch.nn.Identity())
    return model
def unconverted():
    return model_of("llama", torch.float32)
def short():
    return te_fuser.convert(model_of("gpt2", torch.float32, max_position_embeddings=8), check=False)
class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = build()
    def forward(self, ids, more):
        return self.inner(ids)
class Head(Two):
    def __init__(self):
        super().__init__()
        self.head = te_fuser.Sequential(ops.LayerNorm(48), te_fuser.Sequential(ops.GELU()))
    def forward(self, ids):
        return self.head(self.inner(ids).logits)
class Raising(Two):
    def forward(self, ids):
        raise self.error
class Mine(Raising):
    error = ValueError("mine")
class MineOfAnother(Raising):
    error = IndexError("mine")
"""


@pytest.fixture
def converted(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    (tmp_path / "converted_models.py").write_text(CONVERTED)
    return str(tmp_path / "converted_models.py")


@pytest.mark.parametrize(("name", "first"), [("build", "model.layers.0"), ("conversion", "transformer.h.0")])
def test_explain_takes_a_converted_model(
    name: str, first: str, converted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["explain", f"{converted}:{name}", "--input", "2,6:int64", "--device", "h200"]
    assert cli.main(given) == 0
    made = runpy.run_path(converted)[name]()
    explained = (made if isinstance(made, te_fuser.Conversion) else te_fuser.convert(made)).explain(
        torch.zeros(2, 6, dtype=torch.int64), device="h200"
    )
    told = capsys.readouterr().out
    assert told.rstrip() == str(explained) and told.startswith(f"In {first} and 1 other like it:\n\nPlan: ")
    page = tmp_path / "plan.html"
    assert cli.main([*given, "--dtype", "bfloat16", "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    (plan,) = found["plans"]
    assert plan["path"] == first and plan["layers"] == [first, f"{first[:-1]}1"] and plan["device"] == "h200"
    assert not found["by_itself"]
    assert "bfloat16" in page.read_text() and first in page.read_text()


@pytest.mark.parametrize(
    ("verb", "name", "options", "words"),
    [("explain", "build", ["--input", "2,6"], "build has layers of transformers: give ids, --input 2,6:int64"),
     ("explain", "build", ["--device", "b9"], "unknown device 'b9'"),
     ("explain", "emptied", [], "no layer runs by te_fuser in this call"),
     ("explain", "of_meta", [], 'build it on a device, torch.device("cpu") in place of torch.device("meta")'),
     ("explain", "build", ["--passes"], "build has layers of transformers: leave --passes out"),
     ("explain", "unconverted", [], "unconverted has layers of transformers: call te_fuser.convert(model) before"),
     ("explain", "short", ["--input", "2,9:int64"], "short, --input 2,9:int64: IndexError: index out of range in self"),
     ("explain", "Two", [], "Two, --input 2,6:int64: TypeError: Two.forward() missing 1 required positional argument"),
     ("verify", "unconverted", [], "layers of transformers: te_fuser.convert checks them; time the model's own calls"),
     ("bench", "build", [], "layers of transformers: te_fuser.convert checks them; time the model's own calls")],
)  # fmt: skip
def test_a_converted_model_is_answered_in_words(
    verb: str, name: str, options: list[str], words: str, converted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, f"{converted}:{name}", "--input", "2,6:int64", *options]) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.startswith(f"te-fuser {verb}: ") and not told.out


def test_what_runs_by_itself_in_a_layer_has_its_path(converted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{converted}:adapted", "--input", "2,6:int64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [plan["layers"] for plan in found["plans"]][:2] == [["model.layers.0"], ["model.layers.1"]]
    assert all(text.startswith("In model.layers.1: By itself") for text in found["by_itself"]) and found["by_itself"]


@pytest.mark.parametrize("name", ["Mine", "MineOfAnother"])
def test_an_error_of_ones_own_around_a_converted_model_keeps_its_traceback(name: str, converted: str) -> None:
    with pytest.raises((ValueError, IndexError), match="mine"):
        cli.main(["explain", f"{converted}:{name}", "--input", "2,6:int64"])


def test_a_list_beside_converted_layers_is_named(converted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", f"{converted}:Head", "--input", "2,6:int64", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["plans"][0]["layers"] == ["inner.model.layers.0", "inner.model.layers.1"]
    said = f"head is a list, not shown here: have {converted}:Head return it to see it"
    assert [line for line in told.err.splitlines() if "is a list" in line] == [said]


def test_doctor_says_what_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok    C++ compiler:") for line in lines) and lines[-1].startswith("te_fuser runs here")
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["parts"]["torch"]["ok"]


def test_doctor_fails_without_what_kernels_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "find_compiler", lambda _: None)
    assert cli.main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "FAILS C++ compiler:" in told and told.splitlines()[-1].startswith("C++ compiler is missing")


def test_each_verb_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            cli.main([command.name, "--help"])
        assert ended.value.code == 0 and f"example: te-fuser {command.name}" in capsys.readouterr().out
