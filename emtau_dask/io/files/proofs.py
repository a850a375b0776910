"""What a process proves once, and remembers: that it sees what another process saw."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable

REMEMBERED = 256
"""Proofs that a process remembers; one that it has forgotten is made again."""


class Proofs:
    """What this process has proved."""

    def __init__(self) -> None:
        self._settled: dict[str, None] = {}
        self.begin()

    def begin(self) -> None:
        """Make a lock anew: another thread may have held it when this process was forked."""
        self._settling = threading.RLock()

    def once(self, token: str, prove: Callable[[], None]) -> None:
        """Call ``prove`` unless this process has come through it already; other threads wait for it.

        Parameters
        ----------
        token : str
            Stands for what is proved.
        prove : callable () -> None
            Raises where it cannot be.
        """
        if token in self._settled:
            return
        with self._settling:
            if token not in self._settled:
                prove()
                self.settle(token)

    def settle(self, token: str) -> None:
        """Take what ``token`` stands for as proved in this process."""
        with self._settling:
            self._settled[token] = None
            while len(self._settled) > REMEMBERED:
                del self._settled[next(iter(self._settled))]


PROOFS = Proofs()
os.register_at_fork(after_in_child=PROOFS.begin)


def this_process() -> str:
    """Return what a person would call this process: a worker by its address."""
    distributed = sys.modules.get("distributed")
    if distributed is not None:
        try:
            return f"the worker {distributed.get_worker().address}"
        except ValueError:
            pass
    return f"process {os.getpid()} on {platform.node()}"
