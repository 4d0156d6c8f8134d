"""Dependencies of the parts: imports point one way, the fuser names no op, one file for each op and fusion."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import cublaslt, cublaslt_float8, cublaslt_own_scales, registry
from te_fuser.kernels.attention import PROVIDERS, Provider
from te_fuser.ops.base import FusableOperation

PACKAGE = Path(te_fuser.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Part -> the parts it may import, at the head of its files. A part that is new needs a row.
BASE = {"guards", "distributed", "params"}
KNOWS = {
    "capture": {*BASE, "contexts", "fake_tensors", "ops", "kernels", "fuser", "quantization", "sharding"},
    "trace": {"fuser", "ops", "params"},
    "checkpointing": {*BASE, "ops", "quantization"},
    "compare": {"dtypes"},
    "config": set(),
    "contexts": set(),
    "dtypes": set(),
    "record": set(),
    "formula": {"contexts", "dtypes"},
    "fake_tensors": {"contexts"},
    "guards": {"_native"},
    "distributed": {"dtypes", "formula", "config"},
    "params": {"contexts", "dtypes", "formula", "guards", "distributed", "_native"},
    "ops": {*BASE, "dtypes", "formula", "record", "recipe", "_native"},
    "sharding": {"distributed", "formula", "ops"},
    "codegen": {"dtypes", "formula", "config", "record", "_native"},
    "kernels": {*BASE, "dtypes", "formula", "record", "recipe", "ops", "codegen", "config", "_native"},
    "fusions": {*BASE, "contexts", "dtypes", "formula", "recipe", "ops", "codegen", "kernels"},
    "fuser": {
        *BASE, "dtypes", "formula", "ops", "sharding", "codegen", "kernels", "fusions", "config", "compare",
        "contexts", "fake_tensors", "recipe", "record", "_native"},
    "fused_regions": {*BASE, "ops", "fuser", "fake_tensors"},
    "flatten": {*BASE, "ops", "fuser", "fused_regions"},
    "sequential": {*BASE, "ops", "fuser", "flatten", "fake_tensors", "fused_regions"},
    "variants": {*BASE, "flatten", "sequential"},
    "convert": {*BASE, "ops", "fuser", "sequential", "compare", "from_torch"},
    "integrations": {"guards", "convert", "ops", "fuser", "sequential", "__version__"},
    "from_torch": {*BASE, "ops", "sequential", "compare"},
    "verify": {
        *BASE, "dtypes", "formula", "fake_tensors", "ops", "sharding", "codegen", "fusions", "fuser", "flatten",
        "fused_regions", "sequential", "compare", "_native"},
    "recipe": {"contexts"},
    "common": {"recipe"},
    "pytorch": {"", "*"},  # all that `te_fuser` has
    "quantization": {*BASE, "contexts", "dtypes", "formula", "ops", "fuser", "kernels", "recipe", "fake_tensors"},
    "utils": {"recipe"},
    "parallel": {
        *BASE, "formula", "ops", "flatten", "from_torch", "fuser", "fused_regions", "presets", "sequential",
        "sharding"},
    "presets": {*BASE, "ops", "checkpointing", "fuser", "fused_regions", "recipe", "sequential", "variants"},
    "model_commands": {"convert", "from_torch", "fuser", "fake_tensors", "sequential", "verify"},
    "cli": {
        "dtypes", "codegen", "config", "fuser", "kernels", "fusions", "model_commands", "recipe", "_native",
        "__version__"},
}  # fmt: skip
# Modules that import a part above them when it is asked for, not when they are loaded: (module, imported).
WHEN_ASKED = {
    ("te_fuser.sequential", "te_fuser.verify"),
    ("te_fuser.sequential", "te_fuser.from_torch"),
    ("te_fuser.ops.base", "te_fuser.fuser.pipeline"),  # an op that is called by itself
}
# The fuser's rooms, in the order of a call -> the rooms they may import; the pipeline is a file that stands above them.
FUSER = {
    "graph": set(),
    "steps": {"graph"},
    "plan": {"graph", "steps"},
    "run": {"graph", "steps", "plan"},
    "pipeline": {"graph", "steps", "plan", "run"},
    "tune": {"graph", "steps", "plan", "run", "pipeline"},
    "show": {"graph", "steps", "plan", "run", "pipeline"},
}
# Longest chain of the fuser's modules, each of which imports the next.
DEEPEST = 8
# The modules of the C++ target, in the same way.
CPP = ("text", "cpp_schedule", "cpp_scope", "cpp")
# Modules that the fuser may import of the two parts that hold concrete ops and fusions.
ABSTRACT = {
    "te_fuser.ops.autocast",  # a table of policies
    "te_fuser.ops.base",
    "te_fuser.ops.checks",  # of arguments, not an op
    "te_fuser.ops.blockwise_scaling",  # of tensors, not an op
    "te_fuser.ops.products",  # the same
    "te_fuser.ops.row_op",
    "te_fuser.ops.sizes",
    "te_fuser.ops.op_table",
    "te_fuser.ops.tensor_function",
    "te_fuser.ops.operations",
    "te_fuser.fusions.registry",
    "te_fuser.fusions.match",
    "te_fuser.fusions.pattern",
}

# Files of ops/ that hold no op, and those of a family, which export several.
OP_HELPERS = {
    "__init__",
    "attention/__init__",
    "attention/head_parallel",
    "attention/heads",
    "attention/mask",
    "attention/math",
    "autocast",
    "base",
    "checks",
    "construction",
    "hooks",
    "op_table",
    "blockwise_scaling",
    "products",
    "sharing",
    "sizes",
    "tensor_function",
}
FAMILIES = {
    "activations",
    "bias_scale",
    "casts",
    "collectives",
    "dropout",
    "norms",
    "operations",
    "structure",
}
# Tests of an aspect of several modules: folder -> stems. Those of several ranks, in parallel/, all are.
ASPECTS = {
    "": {"bad_input", "docs", "forms_proof", "layout", "public",
         "values_proof", "weight", "works_with"},
    "codegen": {"float8", "targets"},
    "fusions": {"plans", "refusals", "quack", "quack_float8"},
    "kernels": {"written"},
    "formula": {"philox", "row_ops"},
    "ops": {"messages"},
}  # fmt: skip


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _module_or(package: str, name: str) -> str:
    """Module that `from package import name` imports: that of the name, or the package for a name of its own."""
    whole = f"{package}.{name}"
    path = PACKAGE.parent / whole.replace(".", "/")
    return whole if package == "te_fuser" or path.is_dir() or path.with_suffix(".py").exists() else package


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """(module of this package, whether at the head of the file) for everything that a file imports."""
    return [*_imports(tree_of(path), path)]


def _imports(tree: ast.Module, path: Path) -> Iterator[tuple[str, bool]]:
    head = {id(n) for n in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: imports are absolute"
            found = [_module_or(node.module, alias.name) for alias in node.names]
        else:
            continue
        yield from ((name, id(node) in head) for name in found if name.split(".")[0] == "te_fuser")


def classes(path: Path) -> list[str]:
    return [n.name for n in tree_of(path).body if isinstance(n, ast.ClassDef)]


FUSER_FILES = sorted((PACKAGE / "fuser").rglob("*.py"))


def test_imports_point_one_way():
    for path in FILES:
        me = module_of(path)
        part = part_of(me)
        assert not part or part in KNOWS, f"{me}: give {part!r} a row in KNOWS"
        for name, at_head in imports(path) if part else ():
            other = part_of(name)
            allowed = other == part or other in KNOWS[part] or (not at_head and (me, name) in WHEN_ASKED)
            assert allowed, f"{me} imports {name}; {part} may know {sorted(KNOWS[part])}"


def test_a_call_goes_through_the_rooms_of_the_fuser_once():
    """From the list to the graph, its steps, the plan, the run; tuning and showing read what is there."""
    for path in FUSER_FILES:
        room = path.parent.name
        if path.parent == PACKAGE / "fuser":
            assert path.stem in ("__init__", "pipeline"), f"{module_of(path)} stands in no room"
            room = "pipeline"
        found = {name.split(".")[2] for name, _ in imports(path) if name.startswith("te_fuser.fuser.")}
        assert found <= {room, *FUSER[room]}, f"{module_of(path)}: {room} may know {sorted(FUSER[room])}"


def test_loading_a_module_of_the_fuser_goes_eight_deep_at_most():
    """Imports under TYPE_CHECKING do not count."""
    loads = {module_of(path): {n for n, at_head in imports(path) if at_head} for path in FUSER_FILES}
    depths: dict[str, int] = {}
    for module in TopologicalSorter(loads).static_order():
        depths[module] = 1 + max((depths[m] for m in loads.get(module, ())), default=0) if module in loads else 0
    assert max(depths.values()) <= DEEPEST, sorted((d, m) for m, d in depths.items() if d >= DEEPEST)


@pytest.mark.parametrize("stem", CPP)
def test_the_cpp_target_is_made_in_one_order(stem):
    """Modules that both targets share import in one order: loops, text, statements, functions, result; none CUDA's."""
    found = {name.rpartition(".")[2] for name, _ in imports(PACKAGE / "codegen" / f"{stem}.py")}
    assert sorted(found & set(CPP[CPP.index(stem) :])) == []
    assert not [name for name in found if name.startswith("cuda")]


def test_the_rows_have_no_circle():
    done: set[str] = {"_native", "__version__", "", "*"}
    rows = dict(KNOWS)
    while rows:
        free = [part for part, known in rows.items() if known <= done]
        assert free, f"a circle among {sorted(rows)}"
        done |= set(free)
        rows = {part: known for part, known in rows.items() if part not in free}


def test_no_circle_of_modules():
    """Of what modules import when they are loaded; a circle works only for who comes in at the right place."""
    known = {module_of(path): {name for name, at_head in imports(path) if at_head} for path in FILES}
    TopologicalSorter(known).prepare()


def test_the_fuser_names_no_op_and_no_fusion():
    kinds = {name for name in ops.__all__ if getattr(getattr(ops, name), "kind", None) is getattr(ops, name)}
    kinds -= {"RowOp", "UnfusedOperation", "FusedOperation"}
    kinds -= {name for path in FUSER_FILES for name in classes(path)}  # a tensor that a kernel makes
    concrete = kinds | set(fusions.names()) - set(registry._OWN)
    for path in FUSER_FILES:
        known = {name for name, _ in imports(path) if part_of(name) in ("ops", "fusions")}
        assert known <= ABSTRACT, f"{module_of(path)} imports {known - ABSTRACT}"
        nodes = [*ast.walk(tree_of(path))]
        named = {n.id for n in nodes if isinstance(n, ast.Name)} | {
            n.attr for n in nodes if isinstance(n, ast.Attribute)
        }
        named |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert sorted(named & concrete) == [], module_of(path)


@pytest.mark.parametrize(
    "module",
    [te_fuser, *(found for name in te_fuser.__all__ if inspect.ismodule(found := getattr(te_fuser, name)))],
    ids=lambda module: module.__name__,
)
def test_completion_shows_what_is_public(module):
    assert dir(module) == sorted(module.__all__) and all(hasattr(module, name) for name in dir(module))


def test_packages_of_users_are_public():
    assert {"formula", "fusions", "ops", "parallel", "quantization", "recipe", "utils"} <= {*dir(te_fuser)}


def test_autograd_functions():
    """Segments are the only nodes that plans make; references, joined parameters and late inputs have one each.

    One more refuses to differentiate gradients of 8 bits.
    """
    found = []
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and any(ast.unparse(b).endswith("autograd.Function") for b in node.bases):
                found.append((module_of(path), node.name))
    assert found == [
        ("te_fuser.distributed.dtensor", "_Waited"),
        ("te_fuser.distributed.dtensor", "_OwnPart"),
        ("te_fuser.distributed.exchange", "_Exchanged"),
        ("te_fuser.formula.float8", "_Once"),
        ("te_fuser.formula.float8", "Quantized"),
        ("te_fuser.formula.float8", "QuantizedGradient"),
        ("te_fuser.fuser.run.segment", "SegmentFunction"),
        ("te_fuser.ops.casts", "_MeasureGradient"),
        ("te_fuser.ops.float8_matmul", "_Products"),
        ("te_fuser.params.concatenated_parameter", "InOneBuffer"),
    ]


def test_nothing_is_pickled():
    for path in FILES:
        names = {a.name for n in ast.walk(tree_of(path)) if isinstance(n, ast.Import) for a in n.names}
        assert not names & {"pickle", "dill", "cloudpickle", "marshal"}, path


OPS = PACKAGE / "ops"
OP_FILES = [p for p in sorted(OPS.rglob("*.py")) if str(p.relative_to(OPS).with_suffix("")) not in OP_HELPERS]


def test_one_file_for_each_op():
    """A file has the name of the op that it holds, or is that of a family."""
    for path in OP_FILES:
        public = [name for name in classes(path) if name in ops.__all__]
        if path.stem in FAMILIES:
            assert len(public) > 1, f"{path.stem} holds {public}"
            continue
        assert any(name.lower() == path.stem.replace("_", "") for name in public), f"{path.stem} holds {public}"
        kinds = [getattr(ops, name) for name in public]
        if len(kinds) > 1:
            base = next(k for k in kinds if all(issubclass(other, k) for other in kinds))
            assert base is not FusableOperation


def test_every_op_is_exported():
    """An op of the package's own that `te_fuser.ops` lacks could not be written in a list."""
    missing, stack = [], [FusableOperation]
    while stack:
        kind = stack.pop()
        stack += kind.__subclasses__()
        ours = kind.__module__.startswith("te_fuser.ops.") and not kind.__name__.startswith("_")
        if ours and kind.__name__ not in ops.__all__:
            missing.append(kind)
    assert missing == []


FUSIONS = [fusions.get(n) for n in fusions.names() if n not in registry._OWN]
# Files of fusions that hold none: the interface, and parameters that plans make.
NO_FUSIONS = {"__init__", "declaration", "float8_weights", "match", "pattern", "registry", "torch_functions"}


def steps_in_plans() -> set[str]:
    """The steps of plans that tests/fusions/plans.py writes down."""
    texts = [path.read_text() for path in (TESTS / "fusions" / "written").glob("*.txt")]
    return {name for text in texts for name in re.findall(r"^(?:before|forward|backward) \S+ (\S+)", text, re.M)}


def functions_of(f: fusions.Fusion) -> set[str]:
    """The modules of what a fusion is made of."""
    found = (f.run_forward, f.run_backward, f.when, f.cost, f.choose, f.compiles)
    return {getattr(inspect.unwrap(getattr(one, "func", one)), "__module__", "") for one in found if one is not None}


def test_a_file_of_fusions_declares_some_that_plans_take() -> None:
    in_plans = steps_in_plans()
    for path in sorted((PACKAGE / "fusions").glob("*.py")):
        mine = [f for f in FUSIONS if module_of(path) in functions_of(f)]
        assert path.stem in NO_FUSIONS or any(f.name in in_plans for f in mine), f"{path.stem} registers nothing"


ROWS = {f.name for module in (cublaslt, cublaslt_float8, cublaslt_own_scales) for f in module.FUSIONS}


def test_a_fusion_has_a_body_or_chooses_one() -> None:
    """A row of a library's product has none, and plans that are written down take each of them."""
    in_plans = steps_in_plans()
    for entry in FUSIONS:
        has_none = entry.run_forward is entry.run_backward is None
        assert has_none == (entry.choose is not None), entry.name
        assert entry.name not in ROWS or has_none and entry.name in in_plans, entry.name


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda p: p.name)
def test_providers_of_attention_know_neither_each_other_nor_the_list_of_all(provider: Provider) -> None:
    """A file holds those of one library."""
    path = Path(inspect.getfile(type(provider)))
    assert path.parent == PACKAGE / "kernels" / "attention"
    others = {type(p).__module__ for p in PROVIDERS} - {type(provider).__module__} | {"te_fuser.kernels.attention"}
    may_build_on = {"te_fuser.kernels.attention.cudnn"} if provider.name == "cuda_flash_attn_4" else set()  # its speed
    assert sorted((others - may_build_on) & {name for name, _ in imports(path)}) == []


# Room of kernels/ -> what it may know of the others.
ATTENTION = "te_fuser.kernels.attention"
ROOMS = {
    "attention": {"te_fuser.kernels.packages", "te_fuser.kernels.heads_pass"},
    "packages": {f"{ATTENTION}.qkv_views"},
    "cublaslt": {"te_fuser.kernels.tuning_trials"},
}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_of_kernels_know_little_of_each_other(room):
    allowed = {f"te_fuser.kernels.{room.replace('/', '.')}", *ROOMS[room]}
    for path in (PACKAGE / "kernels" / room).glob("*.py"):
        known = [name for name, _ in imports(path) if name.startswith("te_fuser.kernels.")]
        assert not [n for n in known if not any(f"{n}.".startswith(f"{a}.") for a in allowed)], path


def test_tests_mirror_the_package():
    """A test file has the name of a module in the same folder, maybe with an aspect of it behind, or is listed."""
    for path in sorted(TESTS.rglob("test_*.py")):
        folder, stem = path.parent.relative_to(TESTS), path.stem.removeprefix("test_")
        home = PACKAGE.parent / folder if str(folder) == "csrc" else PACKAGE / folder
        if not home.is_dir() or str(folder) == "parallel":
            continue  # tests of the examples, of a GPU, and the like
        modules = {p.stem for p in home.iterdir() if p.is_dir() or p.suffix in (".py", ".cpp")}
        listed = stem in ASPECTS.get("" if str(folder) == "." else str(folder), set())
        assert listed or any(stem == m or stem.startswith(f"{m}_") for m in modules), f"nothing of {home} is {stem}"
