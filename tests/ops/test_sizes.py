"""Sizes that note what is asked of them: each answer holds for exactly the sizes that give it again."""

from __future__ import annotations

import copy
import math
import operator

import pytest

from te_fuser.ops.sizes import Questions, Size, asked, exact, on_grid, rounded_up

SIZES = range(10)


def looked(ask, *sizes):
    """Answer of `ask` for sizes, and the predicate of others that it fits."""
    questions = Questions()
    answer = ask(*questions.sizes(sizes))
    return answer, questions.look()


ASKED = {
    "equal": lambda a, b: a == b,
    "unequal to a number": lambda a, b: a != 3,
    "less": lambda a, b: a < b,
    "at least, turned": lambda a, b: operator.le(4, a),
    "more than a float": lambda a, b: a * b > 7.5,
    "a divisor": lambda a, b: a % 4 == 0,
    "a divisor of a product": lambda a, b: not (6 * a * b) % 4,
    "a quotient": lambda a, b: (a * b) // 3 >= 5,
    "a product": lambda a, b: math.prod((a, b, 2)) == 24,
    "a difference": lambda a, b: a - b > 2,
    "turned": lambda a, b: 20 - a > b + 7,
    "a power": lambda a, b: a**2 > b,
    "bits": lambda a, b: (a & 3) == (b >> 1),
    "truth": lambda a, b: bool(a) and not b,
    "the larger": lambda a, b: max(a, b) > 6,
    "tuples": lambda a, b: (a, b, 1) == (b, a, 1),
    "among": lambda a, b: a in (1, b),
    "a remainder by a size": lambda a, b: b > 0 and a % b == 0,
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_hold_for_the_sizes_that_give_them_again(name):
    ask = ASKED[name]
    for first in ((4, 6), (3, 3), (8, 2), (1, 0), (0, 5)):
        answer, fits = looked(ask, *first)
        assert answer == ask(*first) and fits(*first)
        for a in SIZES:
            for b in SIZES:
                if fits(a, b):
                    assert ask(a, b) == answer, (first, a, b)
        assert any(fits(a, b) for a in SIZES for b in SIZES if (a, b) != first)


TYING = {
    "int": int,
    "float": float,
    "a list's length": lambda a: len([0] * a),
    "a range": lambda a: len(range(a)),
    "a key": lambda a: {5: "five"}.get(a),
    "text": str,
    "format": lambda a: f"{a:03}",
    "bits": lambda a: a.bit_length(),
    "a true quotient": lambda a: a / 2,
    "a product with a float": lambda a: 0.5 * a,
    "another's function": math.log2,
    "a copy": copy.deepcopy,
    "an exclusive or": lambda a: operator.index(a) ^ 1,
}


@pytest.mark.parametrize("name", TYING)
def test_what_hides_its_question_ties_the_plan_to_the_size(name):
    answer, fits = looked(TYING[name], 5)
    assert answer == TYING[name](5)
    assert [n for n in SIZES if fits(n)] == [5]


def test_a_question_is_noted_once_and_one_that_would_divide_by_nothing_does_not_fit():
    questions = Questions()
    for _ in range(12):
        a, b = (Size(v, v, f"s{k}", questions) for k, v in enumerate((4, 8)))
        assert a * 2 == b and a * 2 == b
    assert questions.answers == {"(s0 * 2) == s1": True}
    _, fits = looked(lambda a, b: a // b == 2, 4, 2)
    assert fits(5, 2) and not fits(5, 0)


def test_a_function_of_sizes_is_one_question():
    calls = []

    def parity(word, n, m):
        calls.append((n, m))
        assert type(n) is int
        return f"{word} {(n + m) % 2}"

    def both(a, b):
        return asked(parity, "odd", a, b), asked(parity, "odd", a, b), asked(parity, "even", a, 1)

    answer, fits = looked(both, 3, 4)
    assert answer == ("odd 1", "odd 1", "even 0")
    assert [(a, b) for a in range(3) for b in range(3) if fits(a, b)] == [(1, 0), (1, 2)]
    assert asked(parity, "odd", 3, 4) == "odd 1"  # of plain numbers it is a call


def test_sizes_are_rounded_up_with_what_is_computed_of_them():
    assert [on_grid(n) for n in (0, 1, 2, 3, 4, 5, 1023, 1024, 1025)] == [0, 1, 2, 4, 4, 8, 1024, 1024, 2048]
    a, b = Questions().sizes((5, 3))
    for size in (a * b, a * 24 // 8, b - 1, a % 4):
        assert isinstance(size, Size)
    assert [exact(s) for s in (a, a * b, a * 24 // 8, 7)] == [5, 15, 15, 7]
    assert [rounded_up(s) for s in (a, a * b, a * 24 // 8, 7)] == [8, 32, 24, 7]
    assert exact(a // (a - 8)) == -2 and rounded_up(a // (a - 8)) == 0  # 8 // 0
