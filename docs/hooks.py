"""Hooks of mkdocs: what pages link to outside of docs/ is in the site, and every page is there as Markdown, too.

`site_pages()` is all that the site has, by its path there; mkdocs.yml names this file.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
REPOSITORY = "repository"  # the folder of the site for files that pages link to and that are not in docs/
PARTS = ("ops", "fusions", "recipe", "quantization", "parallel", "formula")
MODULES = ("te_fuser", *(f"te_fuser.{part}" for part in PARTS))
WHOLE = {"FusableOperation", "RowOp", "UnfusedOperation", "FusedOperation", "Match", "FusionCall", "Recipe"}
LINK = re.compile(r"""(\]\(|src(?:set)?=")(?!https?:|mailto:|#)([^)#"\s]+)([^)"]*[)"])""")
FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
CODE_WITH_BARS = re.compile(r"`[^`\n]*\\\|[^`\n]*`")  # in a table GitHub wants bars of code escaped, mkdocs does not
DIRECTIVE = re.compile(r"^::: (\S+)$(\n    options: .*$)?", re.MULTILINE)


def place(path: Path) -> str:
    """Path in the site of a file of the repository; a file of code is a page that shows it."""
    if path.is_dir():
        path = path / "README.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    shown = ".md" if path.suffix == ".py" else ""
    return f"{REPOSITORY}/{path.relative_to(ROOT).as_posix()}{shown}"


def linked(path: Path) -> list[Path]:
    """The files of the repository that a page links to; of one that is not there mkdocs says so."""
    prose = "".join(FENCE.split(path.read_text())[::2])
    found = [(path.parent / target).resolve() for _, target, _ in LINK.findall(prose)]
    return [p for p in found if p.exists()]


def text_of(path: Path) -> str:
    """A file as a page: links lead to where things are in the site."""
    if path.suffix == ".py":
        return f"# {path.relative_to(ROOT).as_posix()}\n\n```python\n{path.read_text()}```\n"
    here = os.path.dirname(place(path))

    def moved(found: re.Match[str]) -> str:
        target = place((path.parent / found[2]).resolve())
        return f"{found[1]}{os.path.relpath(target, here)}{found[3]}"

    parts = FENCE.split(path.read_text())
    parts[::2] = [CODE_WITH_BARS.sub(lambda m: m[0].replace("\\|", "|"), LINK.sub(moved, p)) for p in parts[::2]]
    return "".join(parts)


@functools.cache
def tree_of(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def public_names(module: str) -> list[str]:
    """A module's `__all__` but for its modules, read without importing it."""
    for node in tree_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted({*ast.literal_eval(node.value)} - {"utils", *(name.rpartition(".")[2] for name in MODULES)})
    raise ValueError(f"{module} has no __all__ that is a list of texts")


def defined_in(module: str, name: str) -> str | None:
    """The module that defines a function or a class which `module` has; None for what is assigned."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return module
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            assert node.module
            return defined_in(node.module, name)
    return None


def definitions(module: str) -> dict[str, str | None]:
    return {name: defined_in(module, name) for name in public_names(module)}


def reference_page(module: str) -> str:
    """The page of a module: a directive of mkdocstrings for each public name that has a docstring.

    Each is given by where it is defined, since a module may have its public name; a name stands on one page.
    """
    elsewhere = {of: part for part in MODULES[1:] for of in definitions(part).items()} if module == MODULES[0] else {}
    text = f"# {module}\n\nDocstrings of public names; [Reference](../reference.md) has tables of all names.\n\n"
    for name, of in definitions(module).items():
        if part := elsewhere.get((name, of)):
            text += f"- `{name}`: see [{part}]({part}.md).\n"
    if tables := [f"`{name}`" for name, of in definitions(module).items() if of is None]:
        text += f"- {', '.join(tables)}: see [Reference](../reference.md).\n"
    for name, of in definitions(module).items():
        if of is not None and (name, of) not in elsewhere:
            whole = "    options: {members: null, show_if_no_docstring: false}\n" if name in WHOLE else ""
            text += f"\n::: {of}.{name}\n{whole}"
    return text


def site_pages() -> dict[str, str]:
    """The text of every page, by its path in the site: docs/, pages of the reference, what these link to."""
    waiting, pages = sorted(DOCS.rglob("*.md")), {f"api/{module}.md": reference_page(module) for module in MODULES}
    while waiting:
        path = waiting.pop()
        if place(path) not in pages:
            pages[place(path)] = text_of(path)
            waiting += [p for p in linked(path) if p.suffix in (".md", ".py") and path.suffix == ".md"]
    return pages


def llms_text(pages: dict[str, str]) -> str:
    """All pages with their titles, those in docs/ first, as llms.txt: https://llmstxt.org."""
    lines = [
        "# te_fuser",
        "",
        "> Transformer models in PyTorch from small ops, run as few large kernels.",
        "",
    ]
    of = {"Documents": lambda p: not p.startswith(("api/", "lab/", REPOSITORY)), "Reference": lambda p: p[:4] == "api/"}
    of |= {"Repository": lambda p: p.startswith(REPOSITORY), "Laboratory notes": lambda p: p[:4] == "lab/"}
    for title, belongs in of.items():
        lines += [f"## {title}", ""]
        lines += [f"- [{text[2 : text.index(chr(10))]}]({p})" for p, text in sorted(pages.items()) if belongs(p)] + [""]
    return "\n".join(lines)


# ---- what mkdocs calls ---------------------------------------------------------------------------------------------


def on_files(files: Any, config: Any) -> Any:
    """Pages as `site_pages()` has them, in the place of docs/'s own, and other files that they link to."""
    from mkdocs.structure.files import File

    for place_there, text in site_pages().items():
        if (there := files.get_file_from_path(place_there)) is not None:
            files.remove(there)
        files.append(File.generated(config, place_there, content=text))
    others = {p for page in DOCS.rglob("*.md") for p in linked(page) if p.suffix not in (".md", ".py") and p.is_file()}
    for path in sorted(p for p in others if not p.is_relative_to(DOCS)):
        files.append(File.generated(config, place(path), abs_src_path=str(path)))
    return files


def on_post_build(config: Any) -> None:
    """Every page as Markdown beside its HTML, docstrings in place of directives, and llms.txt."""
    import griffe

    package, pages = griffe.load("te_fuser", search_paths=[str(ROOT)], resolve_aliases=True), site_pages()

    def docstring(module: str, found: re.Match[str]) -> str:
        thing = package[found[1].partition(".")[2]]
        called = f"({', '.join(p.name for p in thing.parameters if p.name != 'self')})"
        return f"## {module}.{thing.name}{called}\n\n{thing.docstring.value if thing.docstring else ''}"

    for name, text in pages.items():
        target = Path(config.site_dir, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(DIRECTIVE.sub(functools.partial(docstring, name[len("api/") : -len(".md")]), text))
    Path(config.site_dir, "llms.txt").write_text(llms_text(pages))
