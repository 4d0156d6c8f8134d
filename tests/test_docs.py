"""The documents say what is, and so does their site: python blocks run, links, paths and names lead somewhere."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.presets.attention_call import ARGUMENTS
from te_fuser.presets.base import Preset
from te_fuser.presets.keyword_arguments import WITHOUT_EFFECT
from te_fuser.verify import examples
from tests.documents import BLOCK, FILES, ROOT, blocks
from tests.parallel.ranks import forking
from tests.public import MODULES
from tests.versions.packages import named

IMAGES = ROOT / "docs" / "images"
PAGE, LEGIBLE = 838, 8  # pixels: how wide a page shows a picture, and the height of letters that can be read
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
NAME = re.compile(r"\bte_fuser(?:\.[A-Za-z_]\w*)+")
WRITTEN_CALL = re.compile(r"`((?:ops|nn)\.\w+\([^`]*\))`")
KNOWN = {"ops": ops, "nn": torch.nn, "torch": torch, "n": 8, "p": 0.1, "a": 4, "b": 8}  # the last: sizes in tables
# A path in backticks; documents leave te_fuser/ away where that is clear, and name the fuser's rooms alone.
PACKAGE = ROOT / "te_fuser"
BASES = (ROOT, PACKAGE, PACKAGE / "fuser", PACKAGE / "kernels")
HEADS = {"te_fuser", "csrc", "tests", "benchmarks", "examples", "docs"}
HEADS |= {p.name for base in BASES[1:] for p in base.iterdir() if p.is_dir()}
WRITTEN_PATH = re.compile(rf"`((?:{'|'.join(sorted(HEADS))})/[\w./*-]*)`")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    program = blocks(path)
    if not program.strip():
        pytest.skip("no python block")
    for package in named(program):
        pytest.importorskip(package)
    script = tmp_path / "blocks.py"
    script.write_text(program)
    # A process of its own: fusions that a document registers must not reach other tests.
    process = forking().Process(target=_run, args=(script,))
    process.start()
    process.join()
    said = script.with_suffix(".log")
    assert process.exitcode == 0, f"{path.name}\n{said.read_text()[-3000:] if said.exists() else 'it said nothing'}"


def _run(script: Path) -> None:
    """Run a program in its folder, on one thread; its output goes to a log."""
    with open(script.with_suffix(".log"), "w") as said:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(said.fileno(), stream.fileno())
    os.chdir(script.parent)
    torch.set_num_threads(1)
    examples._MANY_ROWS = 0  # what verify finds at many rows is not asked here
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")


def test_calls_in_tables_and_sentences_run() -> None:
    """`ops.Fork("skip")` can be written so; what is written with other names, or with ... in it, is a form."""
    ran = 0
    for path in FILES:
        for code in WRITTEN_CALL.findall(BLOCK.sub("", path.read_text())):
            try:
                found = [*ast.walk(ast.parse(code, mode="eval"))]
            except SyntaxError:  # a signature: NamedInput(name, axes, optional=)
                continue
            names = {node.id for node in found if isinstance(node, ast.Name)} - {
                node.arg for node in found if isinstance(node, ast.arg)
            }
            if names <= KNOWN.keys() and not any(isinstance(n, ast.Constant) and n.value is ... for n in found):
                eval(code, {**KNOWN})  # noqa: S307
                ran += 1
    assert ran > 15


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    missing = [target for target in LINK.findall(path.read_text()) if not (path.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_exist(path: Path) -> None:
    written = WRITTEN_PATH.findall(path.read_text())
    assert not [p for p in written if not any(any(base.glob(p.rstrip("/"))) for base in BASES)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_exist(path: Path) -> None:
    """Everything that a document calls te_fuser.something can be had by that name."""
    found: Any
    for name in sorted(set(NAME.findall(path.read_text()))):
        found, module = te_fuser, "te_fuser"
        for part in name.split(".")[1:]:
            module = f"{module}.{part}"
            try:
                found = getattr(found, part) if hasattr(found, part) else importlib.import_module(module)
            except ModuleNotFoundError as missing:  # of a tool that a module of integrations is for
                assert module.startswith("te_fuser.integrations.") and missing.name != module, module
                break


def test_the_guide_names_every_argument() -> None:
    """Coming from Transformer Engine says of each argument of presets and of their calls what comes of it."""
    text = (ROOT / "docs" / "coming-from-transformer-engine.md").read_text()
    made = [kind for kind in vars(te_fuser.presets).values() if isinstance(kind, type) and issubclass(kind, Preset)]
    names = {name for kind in made for of in (kind, kind.forward) for name in inspect.signature(of).parameters}
    names = (names | {*ARGUMENTS, *WITHOUT_EFFECT}) - {"self", "call", "prefix", "packing"}  # the last two: inside
    assert len(made) == 8 and sorted(name for name in names if f"`{name}`" not in text) == []


@pytest.mark.parametrize("name", sorted(p.name for p in IMAGES.glob("*.svg")))
def test_labels_of_pictures_are_legible(name: str) -> None:
    picture = ElementTree.parse(IMAGES / name).getroot()
    scale = PAGE / float(picture.attrib["viewBox"].split()[2])
    found = []
    for label in picture.iter("{http://www.w3.org/2000/svg}text"):
        size = re.search(r"[\d.]+", label.get("font-size") or label.attrib["style"].split("font-size")[1])
        assert size
        found.append((scale * float(size[0]), label.text))
    assert found and [label for label in found if label[0] < LEGIBLE] == []


def test_the_picture_of_a_layer_shows_its_plan() -> None:
    """Should this fail, then plans have changed: python docs/images/layer.py draws it again."""
    module = runpy.run_path(str(IMAGES / "layer.py"))
    assert (IMAGES / "layer.svg").read_text() == module["picture"]()


@pytest.mark.parametrize(
    "part",
    ["fuser", "fusions", "kernels", "codegen", "formula", "verify", "presets", "recipe", "quantization", "convert"],
)
def test_the_design_names_every_module(part: str) -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    stems = {p.stem for p in (PACKAGE / part).rglob("*.py")} - {"__init__"}
    assert sorted(stem for stem in stems if not re.search(rf"[`/]{stem}(\.py)?`", text)) == []


# ---- the site that ./dev docs builds


def test_every_page_is_named_and_the_reference_has_every_public_name() -> None:
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    pages: dict[str, str] = hooks["site_pages"]()
    text, ours = hooks["llms_text"](pages), {p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")}
    assert pages.keys() > ours and [name for name in pages if f"]({name})" not in text] == []
    for module in set(MODULES) - {te_fuser.utils}:
        page = pages[f"api/{module.__name__}.md"]
        names = [n for n in module.__all__ if not inspect.ismodule(getattr(module, n))]
        assert [n for n in names if f".{n}\n" not in page and f"`{n}`" not in page] == []


def test_examples_of_docstrings_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "Examples:", which the site shows as code."""
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    texts = {inspect.getdoc(getattr(module, name)) or "" for module in MODULES for name in module.__all__}
    for text in (text for text in texts if ">>>" in text):
        assert "\nExamples:\n" in text
        runner.run(parser.get_doctest(text, {}, text.partition("\n")[0], None, None))
    assert runner.summarize().attempted > 8 and runner.failures == 0
