"""Lines, names and decimals that every target writes."""

from __future__ import annotations

import math
import struct

import torch

from te_fuser.codegen.text import shortest, to_float32


def test_float32_is_torchs() -> None:
    values = [0.1, -1 / 3, 1e300, -1e300, 3.5e38, 3.4028235e38, 1e-50, 1.401298464324817e-45, math.inf, 16777217.0]
    assert [to_float32(v) for v in values] == torch.tensor(values, dtype=torch.float64).float().tolist()
    assert math.isnan(to_float32(math.nan))


def test_the_shortest_decimal_gives_the_float32_back() -> None:
    bits = torch.randint(0, 0x7F800000, (2000,), generator=torch.Generator().manual_seed(0)).tolist()
    for single in (struct.unpack("f", struct.pack("I", b))[0] for b in [*bits, 0, 1, 0x7F7FFFFF]):
        assert to_float32(float(shortest(single))) == single
    assert [shortest(to_float32(v)) for v in (0.1, 1 / 3, 100.0, 16777216.0)] == [
        "0.1", "0.33333334", "1e+02", "16777216",
    ]  # fmt: skip
