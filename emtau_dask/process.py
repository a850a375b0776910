"""What a process keeps for all fits whose tasks it runs: one object of each kind, found in one place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class ProcessObjects:
    """Objects by what makes them; a forked process begins with none."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all: locks and threads of another process are of no use."""
        self._making = threading.RLock()
        self._made: dict[Callable[[], Any], Any] = {}

    def of(self, make: Callable[[], T]) -> T:
        """Return what ``make`` made when it was first asked for."""
        if make not in self._made:
            with self._making:
                if make not in self._made:
                    self._made[make] = make()
        return cast("T", self._made[make])


_OBJECTS = ProcessObjects()
os.register_at_fork(after_in_child=_OBJECTS.begin)


def of_process(make: Callable[[], T]) -> T:
    """Return this process's own object of a kind.

    Tasks run wherever dask sends them, and find there what tasks of the same process share: the rows that it
    keeps between passes, its budget for reads, its threads that wait, what it has proved.

    Parameters
    ----------
    make : callable () -> object
        A class, or a function of a module; called once in a process.
    """
    return _OBJECTS.of(make)
