"""What is set for the process while chunks are processed side by side in its threads.

BLAS has one thread: results must not depend on how many it happens to use, and
the parallelism is over chunks. (OpenMP's limit is a thread's own: the one library
call that uses OpenMP takes it there, see `kmeans`.) And the interpreter's switch
interval is short. A thread that waits for the interpreter's lock needs some 50 µs
to wake up, in which the other may have finished a call of NumPy and have taken the
lock again; so it goes on, until after the interval the waiting thread gets the lock
for certain.

Both are process-wide, so they are taken once and counted, never entered and left
by single tasks. Since version 3.8 threadpoolctl lets one thread at a time control
OpenBLAS and ignores the others, and the thread that took a limit must be the one
that lifts it. Fits come and go in any thread, so a thread of its own holds the
limit for all of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from threadpoolctl import threadpool_info, threadpool_limits

__all__ = ["hold_for_process", "threads_side_by_side"]

SWITCH_INTERVAL = 5e-5
"""Seconds after which a thread that waits for the interpreter's lock asks for it; Python's own are 5e-3."""


class _Setting:
    """One thread for BLAS, and a short switch interval, from construction until `lift`."""

    def __init__(self) -> None:
        self._usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._usual_interval))
        self._interval = sys.getswitchinterval()
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
        if sys.getswitchinterval() == self._interval:
            sys.setswitchinterval(self._usual_interval)
        if self._own is not None:
            self._own.restore_original_limits()
        self._lifted.set()
        self._holder.join()


_lock = threading.Lock()
_holders = 0
_setting: _Setting | None = None


def _acquire() -> None:
    global _holders, _setting
    with _lock:
        if _holders == 0:
            _setting = _Setting()
        _holders += 1


def _release() -> None:
    global _holders, _setting
    with _lock:
        _holders -= 1
        if _holders == 0 and _setting is not None:
            _setting.lift()
            _setting = None


@contextmanager
def threads_side_by_side() -> Iterator[None]:
    """Hold BLAS to one thread, and the switch interval short; nested and concurrent holders share them."""
    _acquire()
    try:
        yield
    finally:
        _release()


def hold_for_process() -> None:
    """Hold both for the rest of this process, unless somebody holds them already.

    Called by tasks: in the fitting process it does nothing, in a worker process
    it takes them with the first task.
    """
    if _holders == 0:
        _acquire()
