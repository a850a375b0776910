"""Calls side by side in threads of this process, where what takes time is waiting."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
PARALLEL = 16

_inside = threading.local()


@cache
def _pool() -> ThreadPoolExecutor:
    """Return this process's threads, kept: starting some takes longer than most calls."""
    return ThreadPoolExecutor(
        PARALLEL,
        thread_name_prefix="emtau-objects",
        initializer=lambda: setattr(_inside, "pool", True),
    )


os.register_at_fork(after_in_child=_pool.cache_clear)


def each(function: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Return ``function`` of every item, computed side by side: what takes time here is waiting.

    All calls have ended when this one does, also where one of them raises.
    Called from within such a call, it works through the items in turn.
    """
    todo = list(items)
    if len(todo) < 2 or getattr(_inside, "pool", False):
        return [function(item) for item in todo]
    futures: list[Future[R]] = []
    try:
        futures.extend(_pool().submit(function, item) for item in todo)
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
