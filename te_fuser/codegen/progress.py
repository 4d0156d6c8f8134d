"""A word to the user about what takes long: compiling kernels, importing packages that compile theirs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

_PATIENCE = 1.0  # seconds without a word


class Progress:
    """Line on stderr that says, after a second, what is waited for, its `state`, and how it ended."""

    def __init__(self, what: str, state: Callable[[], str] = str) -> None:
        self._what, self._state = f"te_fuser: {what}", state
        self._said = self._ended = False
        self._turn = threading.Lock()  # the first word is out before the last one, or never comes
        self._started = time.monotonic()
        self._timer = threading.Timer(_PATIENCE, self._say)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._turn:
            self._ended = True
            if self._said:
                how, seconds = "failed" if kind else "done", time.monotonic() - self._started
                ended = f"{self._what}: {how} after {seconds:.1f} s"
                if error is not None:
                    words = str(error).strip().partition("\n")[0]
                    ended += f": {type(error).__name__}" + f": {words}" * bool(words)
                print(ended, file=sys.stderr, flush=True)

    def _say(self) -> None:
        with self._turn:
            if not self._ended:
                print(f"{self._what}{self._state()} ...", file=sys.stderr, flush=True)
                self._said = True
