"""Calls side by side in threads of this process, for work that mostly waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from emtau_dask.process import of_process

T = TypeVar("T")
R = TypeVar("R")
PARALLEL = 16


class WaitingThreads:
    """Threads that a process keeps, because to start them takes longer than most calls."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._pool = ThreadPoolExecutor(
            PARALLEL,
            thread_name_prefix="emtau-objects",
            initializer=lambda: setattr(self._own, "inside", True),
        )

    def each(self, function: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Return ``function`` of every item, computed side by side.

        All calls have ended when this one does, also where one of them raises. Within such a call, items
        are computed one after another.
        """
        todo = list(items)
        if len(todo) < 2 or getattr(self._own, "inside", False):
            return [function(item) for item in todo]
        futures: list[Future[R]] = []
        try:
            futures.extend(self._pool.submit(function, item) for item in todo)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)


def each(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``function`` of every item, by this process's `WaitingThreads`."""
    return of_process(WaitingThreads).each(function, items)
