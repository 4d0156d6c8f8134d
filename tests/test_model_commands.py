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
     ("{models}:number", [], "gives int: name a torch.nn.Module, or a function that does"),
     ("{models}:convolution", [], "is no te_fuser.Sequential, and from_torch does not take it"),
     ("{models}:build", ["--dtype", "number"], "--dtype number is none of torch's"),
     ("{models}:build", ["--device", "b9"], "b9"), (":build", [], "':build' names no model"),
     ("{models}:of_size", [], "takes arguments (missing a required argument: 'size'): name a function without"),
     ("{models}:ends", [], "ends the process, with status 0, before there is a model"),
     ("{models}:two_inputs", [], "reads 'skip', which no Fork before it binds"),
     ("{models}:build", ["--dtype", "int64"], "takes floating-point tensors, got int64"),
     ("{models}:build", ["--input", "3,8:number"], "--input 3,8: number is none of torch's dtypes"),
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


CONVERTED = """
import torch
import te_fuser
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
    assert found["by_itself"] == [f"In {first} and 1 other like it:"] and found["plans"][0]["device"] == "h200"
    assert "bfloat16" in page.read_text() and first in page.read_text()


@pytest.mark.parametrize(
    ("verb", "name", "options", "words"),
    [("explain", "build", ["--input", "2,6"], "build takes ids: give --input 2,6:int64"),
     ("explain", "build", ["--device", "b9"], "unknown device 'b9'"),
     ("explain", "emptied", [], "no layer runs by te_fuser in this call"),
     ("explain", "of_meta", [], "of_meta is a converted model; it is on the meta device, and explain runs it once"),
     ("explain", "build", ["--passes"], "build is a converted model; it has no --passes"),
     ("verify", "build", [], "build is a converted model: te_fuser.convert checks it; time its own calls"),
     ("bench", "build", [], "build is a converted model: te_fuser.convert checks it; time its own calls")],
)  # fmt: skip
def test_a_converted_model_is_answered_in_words(
    verb: str, name: str, options: list[str], words: str, converted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, f"{converted}:{name}", "--input", "2,6:int64", *options]) == 2
    told = capsys.readouterr()
    assert words in told.err and told.err.startswith(f"te-fuser {verb}: ") and not told.out


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
