"""Write the plans of all models down: `python -m tests.plans`, and `git diff` shows what a change changes.

`python -m tests.plans FOLDER` writes elsewhere, with the whole text of kernels.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch

from te_fuser.fuser.show.explain import Explanation
from tests.plans.models import CASES
from tests.plans.test_plans import FOLDER, OTHERS, file_of
from tests.plans.text import DEVICES, plans_of, text_of, text_of_passes
from tests.settings import settle


def main() -> None:
    """Write one file for each model."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        file_of(name, folder).write_text(text_of(case))
        if folder != FOLDER and not case.is_short:
            for device in DEVICES:
                sources = Explanation(plans_of(case, device, "balanced"), True).sources()
                text = "\n".join(f"// {title}\n{source}" for title, source in sources.items())
                file_of(f"{name} on {device.name}", folder).write_text(text)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as empty:
        settle(patch, "avx512", Path(empty))
        for name, made in OTHERS.items():
            file_of(name, folder).write_text(text_of_passes(made))


if __name__ == "__main__":
    main()
