"""Pages that are programs, as notebooks in the site with what their cells print: ./dev docs --notebooks runs them.

Cells run by the Python that is the argument, which has te_fuser; packages of Jupyter are in the site's environment.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import tempfile
from pathlib import Path

import jupytext
from hooks import DOCS, ROOT, text_of
from nbclient import NotebookClient

PAGES = ("quickstart.md", "how-to/performance.md")
_START = "import site; site.addsitedir({!r}); from ipykernel.kernelapp import main; main()"


def main(python: str) -> None:
    kernel = Path(sys.prefix, "share", "jupyter", "kernels", "te_fuser", "kernel.json")
    start = [python, "-c", _START.format(sysconfig.get_path("purelib")), "-f", "{connection_file}"]
    kernel.parent.mkdir(parents=True, exist_ok=True)
    kernel.write_text(json.dumps({"argv": start, "display_name": "te_fuser", "language": "python"}))
    for page in PAGES:
        notebook = jupytext.reads(text_of(DOCS / page), fmt="md")
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(notebook, kernel_name="te_fuser", resources={"metadata": {"path": folder}})
            client.execute()
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
        target = (ROOT / "build" / "site" / page).with_suffix(".ipynb")
        target.parent.mkdir(parents=True, exist_ok=True)
        jupytext.write(notebook, target)
        print(target.relative_to(ROOT))


main(*sys.argv[1:])
