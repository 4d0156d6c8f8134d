"""Keywords of presets as type checkers see them: those of the signatures at run time, misspelt ones and wrong types."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from te_fuser.presets import keyword_arguments, keyword_types
from te_fuser.presets.base import Preset
from tests.documents import ROOT
from tests.keyword_types import WRITTEN, keywords, makers, text


def test_the_file_is_what_the_signatures_say() -> None:
    assert text().splitlines() == WRITTEN.read_text().splitlines(), "see tests/keyword_types.py"


@pytest.mark.parametrize("preset", makers())
def test_a_constructor_takes_its_keywords_with_their_types(preset: type[Preset]) -> None:
    own, known = f"{preset.__name__}Keys", {**vars(keyword_arguments), **vars(keyword_types)}
    assert inspect.signature(preset.__init__).parameters["keywords"].annotation == f"Unpack[{own}]"
    hints = typing.get_type_hints(getattr(keyword_types, own))
    assert hints == {name: eval(of, known) for name, of in keywords(preset).items()}
    assert {"device", "params_dtype", "memory", "verify"} < hints.keys()


PROGRAM = """\
import torch
import te_fuser
import te_fuser.pytorch as te
te.Linear(8, 8, True, memory=2**20, device="cpu", tp_size=2, params_dtype=torch.bfloat16, init_method=None)
te.TransformerLayer(8, 8, 1, 1, 1e-5, 0.0, self_attn_mask_type="causal", activation_params={"limit": 7}, bias=False)
te.Linear(8, 8, params_dtyp=torch.float32)  # error: "params_dtyp"
te.LayerNorm(8, device=1.0)  # error: "device"
te_fuser.RMSNorm(8, zero_centred_gamma=True)  # error: "zero_centred_gamma"
te_fuser.LayerNormLinear(8, 8, normalization=3)  # error: "normalization"
te_fuser.LayerNormMLP(8, 8, activatoin="gelu")  # error: "activatoin"
te_fuser.MultiheadAttention(8, 1, input_layernorm="yes")  # error: "input_layernorm"
te_fuser.DotProductAttention(8, 1, soft_cap=1.0)  # error: "soft_cap"
te_fuser.TransformerLayer(8, 8, 1, memory=0.5)  # error: "memory"
"""


@pytest.mark.slow
def test_mypy_reports_a_misspelt_keyword_and_a_wrong_type(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", f"--cache-dir={tmp_path}", str(program)]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.findall(r'program\.py:(\d+): error: .*? ("\w+")', said.stdout)
    wanted = [(str(k), line.rpartition(" ")[2]) for k, line in enumerate(PROGRAM.splitlines(), 1) if "# error" in line]
    assert len(wanted) == 8 and found == wanted, said.stdout + said.stderr
