"""Calls that are refused before anything is computed."""

from __future__ import annotations

import re

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Computed(TorchDispatchMode):
    """Notes every PyTorch operation on tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() != "aten::promote_types":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def refused(error, words, call):
    """`call` raises, its message holds all the words, and nothing was computed before."""
    with Computed() as mode, pytest.raises(error) as raised:
        call()
    assert mode.names == []
    text = str(raised.value)
    for word in words:
        assert re.search(word, text), f"{word!r} is not in {text!r}"


def raises(error, words, call, *args, **named):
    """`call` with these arguments raises, and its message has the words."""
    with pytest.raises(error, match=words):
        call(*args, **named)


def refusals(table):
    """A test for a module: each call of {name: (call, kind of error, words)} raises with the words."""

    @pytest.mark.parametrize("name", table)
    def test(name):
        call, kind, words = table[name]
        with pytest.raises(kind, match=words):
            call()

    return test
