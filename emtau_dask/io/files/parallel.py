"""Calls side by side in threads of this process, for work that mostly waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from emtau_dask.calls import Calls, Threads
from emtau_dask.interrupts import Stop
from emtau_dask.process import of_process

T = TypeVar("T")
R = TypeVar("R")
PARALLEL = 16


class WaitingThreads:
    """Threads that a process keeps, because to start them takes longer than most calls."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._threads = Threads(PARALLEL, "emtau-objects")

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return ``function`` of every item, computed side by side.

        All calls have ended when this one does, also where one of them raises; after an interrupt they are
        waited for a second at most. Of several errors it raises the first item's. Within such a call, items
        are computed one after another.
        """
        todo = list(items)
        if len(todo) < 2 or getattr(self._own, "inside", False):
            return [function(item) for item in todo]
        failed: dict[int, Exception] = {}

        def call(place: int) -> R:
            self._own.inside = True
            try:
                return function(todo[place])
            except Exception as error:
                failed[place] = error
                raise

        try:
            with Calls[int, R](self._threads.submit, Stop()) as calls:
                for place in range(len(todo)):
                    calls.begin(place, partial(call, place))
                found = dict(calls.take() for _ in todo)
                return [found[place] for place in range(len(todo))]
        except Exception:
            if not failed:
                raise
        raise failed.pop(min(failed))


def each(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``function`` of every item, by this process's `WaitingThreads`."""
    return of_process(WaitingThreads).each(function, items)
