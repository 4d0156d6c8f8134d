"""The table of versions in docs/works-with.md: a row for each package, from the lock and from what was tested."""

from __future__ import annotations

import re
from typing import Any

from requirements.installed import locked
from tests.versions.packages import KINDS, MODULES, ROOT

PAGE = ROOT / "docs" / "works-with.md"
BEGIN, END = "<!-- versions: ./dev versions --write -->\n", "<!-- /versions -->"
AGES = ("oldest", "newest")
HEAD = ("package", "oldest", "locked", "newest")
# Python below which some packages have no new releases any more, and the lock has others.
_PYTHON = {"python_version": "3.12", "python_full_version": "3.12.0"}


def lock() -> dict[str, str]:
    """Package -> the version that ./dev installs."""
    (torch,) = re.findall(r"^readonly DEFAULT_TORCH=torch==(\S+)$", (ROOT / "dev").read_text(), re.MULTILINE)
    return {**locked(_PYTHON), "torch": torch}


def read(page: str) -> dict[str, dict[str, str]]:
    """Package -> column -> version, as the page has them."""
    text = page[page.index(BEGIN) + len(BEGIN) : page.index(END)]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert rows[0] == [*HEAD] and set("".join(rows[1])) <= {"-"}, "the head of the table of versions"
    return {row[0]: dict(zip(HEAD[1:], row[1:], strict=True)) for row in rows[2:]}


def merged(cells: dict[str, dict[str, str]], records: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Cells with what the environments in the records have, where all their tests passed."""
    table = {package: {**cells.get(package, {}), "locked": lock()[package]} for package in MODULES}
    for kind, packages in KINDS.items():
        for age in AGES:
            record = records.get(f"{kind}-{age}")
            if record and record["code"] == 0:
                for package in packages.keys() & record["versions"].keys():  # a run of old may lack one
                    table[package][age] = record["versions"][package].partition("+")[0]
    return table


def written(page: str, records: dict[str, Any]) -> str:
    """The page with the table of these records; a column that they lack stays as it was."""
    table = merged(read(page), records)
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [(f"`{package}`", *(cells.get(column, "") for column in HEAD[1:])) for package, cells in table.items()]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines).replace(
        "| --- | --- | --- | --- |", "|---|---|---|---|"
    )
    return page[: page.index(BEGIN) + len(BEGIN)] + text + page[page.index(END) :]
