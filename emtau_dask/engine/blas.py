"""One thread for BLAS and OpenMP while chunks are processed side by side.

Results must not depend on how many threads a library happens to use, and the
parallelism is over chunks. `threadpoolctl`'s limits are process-wide, so they
are taken once and counted, never entered and left by single tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_limits

__all__ = ["hold_single_thread", "single_threaded_libraries"]

_lock = threading.Lock()
_holders = 0
_limits: threadpool_limits | None = None


def _acquire() -> None:
    global _holders, _limits
    with _lock:
        if _holders == 0:
            _limits = threadpool_limits(limits=1)
        _holders += 1


def _release() -> None:
    global _holders, _limits
    with _lock:
        _holders -= 1
        if _holders == 0 and _limits is not None:
            _limits.restore_original_limits()
            _limits = None


@contextmanager
def single_threaded_libraries() -> Iterator[None]:
    """Hold BLAS and OpenMP to one thread; nested and concurrent holders share one limit."""
    _acquire()
    try:
        yield
    finally:
        _release()


def hold_single_thread() -> None:
    """Hold the limit for the rest of this process, unless somebody holds it already.

    Called by tasks: in the fitting process it does nothing, in a worker process
    it takes the limit with the first task.
    """
    if _holders == 0:
        _acquire()
