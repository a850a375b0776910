"""One thread for BLAS while chunks are processed side by side.

Results must not depend on how many threads BLAS happens to use, and the
parallelism is over chunks. Its limit is process-wide, so it is taken once and
counted, never entered and left by single tasks. (OpenMP's is a thread's own:
the one library call that uses OpenMP takes it there, see `kmeans`.)

Since version 3.8 threadpoolctl lets one thread at a time control OpenBLAS and
ignores the others, and the thread that took a limit must be the one that lifts
it. Fits come and go in any thread, so a thread of its own holds the limit for
all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_info, threadpool_limits

__all__ = ["hold_single_thread", "single_threaded_blas"]


class _Limit:
    """One thread for BLAS from construction until `lift`."""

    def __init__(self) -> None:
        self._taken, self._lifted = threading.Event(), threading.Event()
        self._holder = threading.Thread(target=self._hold, name="emtau-blas-limit", daemon=True)
        self._holder.start()
        self._taken.wait()
        controlled_elsewhere = any(
            library["user_api"] == "blas" and library["num_threads"] != 1 for library in threadpool_info()
        )
        self._own = threadpool_limits(limits=1, user_api="blas") if controlled_elsewhere else None

    def _hold(self) -> None:
        try:
            with threadpool_limits(limits=1, user_api="blas"):
                self._taken.set()
                self._lifted.wait()
        finally:
            self._taken.set()

    def lift(self) -> None:
        if self._own is not None:
            self._own.restore_original_limits()
        self._lifted.set()
        self._holder.join()


_lock = threading.Lock()
_holders = 0
_limit: _Limit | None = None


def _acquire() -> None:
    global _holders, _limit
    with _lock:
        if _holders == 0:
            _limit = _Limit()
        _holders += 1


def _release() -> None:
    global _holders, _limit
    with _lock:
        _holders -= 1
        if _holders == 0 and _limit is not None:
            _limit.lift()
            _limit = None


@contextmanager
def single_threaded_blas() -> Iterator[None]:
    """Hold BLAS to one thread; nested and concurrent holders share one limit."""
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
