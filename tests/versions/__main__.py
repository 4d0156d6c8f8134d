"""python -m tests.versions: the oldest and the newest versions that are taken, each in an environment of its own."""

from __future__ import annotations

import argparse
import json
import shutil

from tests.versions import packages
from tests.versions.environments import ENVIRONMENTS, NotMade
from tests.versions.packages import ROOT

RECORDS = ROOT / "runs" / "versions.json"


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev versions", description=__doc__.partition(": ")[2])
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(ENVIRONMENTS)}; else all of them")
    parser.add_argument("--write", action="store_true", help="run none: write docs/works-with.md by the last runs")
    parser.add_argument("--remove", action="store_true", help="remove each environment that passed: 5 GB of PyTorch's")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*ENVIRONMENTS}:
        parser.error(f"no environment is called {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
    page = packages.PAGE.read_text()
    if arguments.write:
        packages.PAGE.write_text(packages.written(page, records))
        return 0
    failed = []
    for name in arguments.names or ENVIRONMENTS:
        environment = ENVIRONMENTS[name]
        try:
            records[name] = environment.test()
        except NotMade as why:
            print(f"{name}: {why}")
            records[name] = {"code": 1}
        RECORDS.parent.mkdir(exist_ok=True)
        RECORDS.write_text(json.dumps(records, indent=2) + "\n")
        if records[name]["code"]:
            failed.append(name)
        elif arguments.remove:
            shutil.rmtree(environment.folder)
    before, now = packages.read(page), packages.read(packages.written(page, records))
    for package, cells in now.items():
        print(f"{package:20}", *(f"{age} {cells.get(age, '-'):10}" for age in packages.HEAD[1:]))
    if now != before:
        print("docs/works-with.md has other versions: ./dev versions --write")
    if failed:
        print(f"failed: {', '.join(failed)}. Mend it, or bound it in pyproject.toml and say so in docs/works-with.md")
    return 1 if failed else 0


raise SystemExit(main())
