"""What a process proves once and remembers: that it sees the same data as another process."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

REMEMBERED = 256
"""Proofs that a process remembers; one that it has forgotten is made again."""


class Proofs:
    """What this process has proved."""

    def __init__(self) -> None:
        self._settled: dict[str, None] = {}
        self._settling = threading.RLock()

    def once(self, token: str, prove: Callable[[], None]) -> None:
        """Call ``prove`` unless it has returned before for this token; other threads wait meanwhile.

        Whatever ``prove`` raises is passed on, and the next call tries again.
        """
        if token in self._settled:
            return
        with self._settling:
            if token not in self._settled:
                prove()
                self.settle(token)

    def settle(self, token: str) -> None:
        """Remember what ``token`` stands for as proved."""
        with self._settling:
            self._settled[token] = None
            while len(self._settled) > REMEMBERED:
                del self._settled[next(iter(self._settled))]


def this_process() -> str:
    """Return the name of this process in messages: a worker's is its address."""
    distributed = sys.modules.get("distributed")
    if distributed is not None:
        with suppress(ValueError):
            return f"the worker {distributed.get_worker().address}"
    return f"process {os.getpid()} on {platform.node()}"
