"""The random bits: known answers, independence, and no dependence on how a row is cut."""

from __future__ import annotations

import pytest
import torch

from te_fuser.formula import Axes, expr, keep_mask, split
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.random import RandomStream, keep_bits, philox, threshold, using

ONES = 0xFFFFFFFF
MASK = (1 << 32) - 1


def words(counter: tuple[int, int, int, int], seed: int) -> list[int]:
    return [int(w) for w in philox(tuple(torch.tensor(c) for c in counter), seed)]  # type: ignore[arg-type]


def philox_of_python(counter: tuple[int, int, int, int], seed: int) -> list[int]:
    """Philox in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, seed >> 32
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK, (p0 >> 32) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return [c0, c1, c2, c3]


# Random123's known answers for philox4x32 with 7 rounds.
KNOWN = [
    ((0, 0, 0, 0), 0, [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]),
    ((ONES, ONES, ONES, ONES), (ONES << 32) | ONES, [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]),
]


@pytest.mark.parametrize(("counter", "seed", "want"), KNOWN)
def test_known_answers(counter: tuple[int, int, int, int], seed: int, want: list[int]) -> None:
    assert words(counter, seed) == want == philox_of_python(counter, seed)


def test_random_counters_agree_with_unbounded_integers() -> None:
    drawn = torch.randint(0, 1 << 32, (50, 6), generator=torch.Generator().manual_seed(0)).tolist()
    for *counter, low, high in drawn:
        seed = (high << 32) | low
        assert words(tuple(counter), seed) == philox_of_python(tuple(counter), seed)


def test_bits_of_an_element_come_from_its_place() -> None:
    """Element (row, column) is a half of a word of the counter that the module's text gives."""
    width, seed, offset, stream = 21, (5 << 32) | 9, 4, 3
    rows = torch.tensor([0, 2, 1 << 33])
    bits = keep_bits(rows, width, seed, offset, stream)
    assert bits.shape == (3, width)
    for i, row in enumerate(rows.tolist()):
        for column in range(width):
            group = row * 3 + column // 8
            word = philox_of_python((group & MASK, group >> 32, stream, offset), seed)[column % 8 // 2]
            assert bits[i, column] == (word >> 16 if column % 2 else word & 0xFFFF)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(p: float) -> None:
    """Within five standard deviations of what the threshold says."""
    n = 512 * 1024
    with using(RandomStream(1234, 0, 5)):
        kept = keep_mask(torch.ones(512, 1024), p).mean().item()
    chance = 1 - threshold(p) / 65536
    assert abs(chance - (1 - p)) < 2**-17
    assert abs(kept - chance) < 5 * (chance * (1 - chance) / n) ** 0.5


def test_rate_per_sample() -> None:
    inner, samples = 2, 20_000
    x = torch.ones(inner * samples, 3)
    with using(RandomStream(11, 0, 5, inner, samples)):
        mask = keep_mask(x, 0.25, per_sample=True)
    assert mask.shape == (inner * samples, 1)
    assert torch.equal(mask[0::2], mask[1::2])  # both rows of a sample
    assert abs(mask.mean().item() - 0.75) < 5 * (0.1875 / samples) ** 0.5


@pytest.mark.parametrize(("width", "parts"), [(24, 2), (24, 3), (20, 4), (10, 5)])
def test_parts_are_slices(width: int, parts: int) -> None:
    """Also where a part begins inside a group of eight."""
    x = torch.randn(6, width, dtype=torch.float64)
    stream = RandomStream(3, 1, 4)
    with using(stream):
        whole = x * keep_mask(x, 0.5)
    leaf = expr.leaf("x", Axes.FULL, width)
    pieces = split(leaf * keep_mask(leaf, 0.5), parts)
    got = Interpreter({"x": x}, {"keep": stream}, 6, x).run(pieces)
    assert torch.equal(torch.cat(got, -1), whole)


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_threshold_refuses_what_is_no_probability(p: float) -> None:
    with pytest.raises(ValueError, match="drop probability"):
        threshold(p)


def test_threshold() -> None:
    assert (threshold(0), threshold(1), threshold(0.5), threshold(0.1)) == (0, 65536, 32768, 6554)
