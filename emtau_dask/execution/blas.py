"""What is set for the process while chunks are processed side by side in its threads.

BLAS has one thread: results must not depend on how many it happens to use, and
the parallelism is over chunks. (OpenMP's limit is a thread's own: the one library
call that uses OpenMP takes it there, see `init.kmeans`.) And the interpreter's switch
interval is short. A thread that waits for the interpreter's lock needs some 50 µs
to wake up, in which the other may have finished a call of NumPy and have taken the
lock again; so it goes on, until after the interval the waiting thread gets the lock
for certain. Where malloc is glibc's, it keeps what arrays leave for the next ones.

All are process-wide. The first two are taken once and shared, never entered and left
by single tasks. Since version 3.8 threadpoolctl lets one thread at a time control
OpenBLAS and ignores the others, and the thread that took a limit must be the one
that lifts it. Fits come and go in any thread, so a thread of its own holds the
limit for all of them.

An interrupt may fall between any two instructions of the main thread. So what that
thread does is to hold a lock by a ``with`` statement, in which there is no such
place; all that has to be undone is done by the other thread, which no interrupt
reaches: it waits for the lock, and then lifts the limit.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from uuid import uuid4

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

SWITCH_INTERVAL = 5e-5
"""Seconds after which a thread that waits for the interpreter's lock asks for it; Python's own are 5e-3."""
KEPT_BYTES = 2**25 - 2**16
"""Size of the largest array whose memory glibc may keep: it counts no array of more than 32 MiB."""


_IMPORTED = uuid4().hex


def process_id() -> str:
    """Return a name that no other process has, on whatever host."""
    return f"{_IMPORTED}-{os.getpid()}"


def _keep_memory() -> None:
    """Let malloc keep some 64 MiB for each thread of what arrays leave when they are gone.

    glibc gives free memory back to the system where that is more than twice as much as the largest array took
    that has gone before, and later gets it anew, page by page, filled with zeros. So a larger array comes and
    goes here, of which no page is used. Whoever has set one of its limits, as dask does in workers, has
    decided otherwise, and nothing changes (mallopt(3), M_MMAP_THRESHOLD).
    """
    np.empty(KEPT_BYTES, np.uint8)


class _Setting:
    """One thread for BLAS, and a short switch interval, from construction until `lift`.

    Memory is kept from construction on.
    """

    def __init__(self) -> None:
        _keep_memory()
        self._usual_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._usual_interval))
        self._interval = sys.getswitchinterval()
        self._limits = threadpool_limits(limits=1, user_api="blas")

    def lift(self) -> None:
        """Restore the first two, in the thread that took them, or in a process without that thread."""
        if sys.getswitchinterval() == self._interval:
            sys.setswitchinterval(self._usual_interval)
        with self._limits:  # Its end restores the limits, and lets other threads control OpenBLAS.
            pass


class _Hold:
    """That somebody wants the setting.

    Attributes
    ----------
    held : Lock
        Locked for as long as that is so.
    begun, ended : Lock
        Locked until the setting is in force, and until it is known whether others hold it still.
    leaving : bool
        Whether ``held`` has been released.
    """

    def __init__(self) -> None:
        self.held, self.begun, self.ended = threading.Lock(), threading.Lock(), threading.Lock()
        self.begun.acquire()
        self.ended.acquire()
        self.leaving = False


class _Holders:
    """Those who hold the setting; a thread serves them, from the first one's coming to the last one's going.

    Attributes
    ----------
    lock : RLock
        Of all that follows; held while the setting is taken or lifted.
    holds : list of _Hold
        The thread waits for the first.
    setting : _Setting or None
        None where it is not in force.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self.holds: list[_Hold] = []
        self.setting: _Setting | None = None

    def enter(self, hold: _Hold) -> bool:
        """Return once the setting is in force, whether it has been taken for this ``hold``, which is held."""
        with self.lock:
            for left in [other for other in self.holds[1:] if not other.held.locked()]:
                self.holds.remove(left)
                left.ended.release()
            self.holds.append(hold)
            first = self.setting is None
        if first:
            threading.Thread(target=self._serve, name="emtau-blas-limit", daemon=True).start()
            hold.begun.acquire()
        return first

    def leave(self, hold: _Hold) -> None:
        """Wait for the end of the setting where nobody but ``hold``, which has been released, held it."""
        with self.lock:
            hold.leaving = True
            if hold not in self.holds:
                return
            if self.setting is None:  # Interrupted while it entered.
                self.holds.remove(hold)
                return
            ends = all(other.leaving or not other.held.locked() for other in self.holds)
        if ends:
            hold.ended.acquire()

    def _serve(self) -> None:
        with self.lock:
            if self.setting is not None or not self.holds:
                return
            try:
                self.setting = _Setting()
            finally:
                for hold in self.holds:
                    hold.begun.release()
        while self.setting is not None:
            first = self.holds[0]
            first.held.acquire()
            with self.lock:
                left = [hold for hold in self.holds if hold is first or not hold.held.locked()]
                self.holds = [hold for hold in self.holds if hold not in left]
                if not self.holds:
                    self.setting.lift()
                    self.setting = None
                for hold in left:  # Whoever waits for the last end finds the setting lifted.
                    hold.ended.release()

    def forget(self) -> None:
        """Begin anew in a forked process, where the thread is not: what it would do is done here."""
        setting, holds = self.setting, self.holds
        self._begin()
        for hold in holds:
            hold.ended.release()
        if setting is not None:
            setting.lift()


_HOLDERS = _Holders()
# A fork waits until the setting has been taken or lifted whole: its child could do neither.
os.register_at_fork(
    before=lambda: _HOLDERS.lock.acquire(),
    after_in_parent=lambda: _HOLDERS.lock.release(),
    after_in_child=_HOLDERS.forget,
)


@contextmanager
def threads_side_by_side() -> Iterator[None]:
    """Hold BLAS to one thread, and the switch interval short; nested and concurrent holders share them."""
    hold = _Hold()
    try:
        with hold.held, _here() if _HOLDERS.enter(hold) else nullcontext():
            yield
    except GeneratorExit:  # An interrupt left nobody to end this but the collector of garbage.
        raise
    except BaseException:
        _HOLDERS.leave(hold)
        raise
    _HOLDERS.leave(hold)


@contextmanager
def _here() -> Iterator[None]:
    """Hold BLAS to one thread by this thread too, where it controls OpenBLAS by a limit of the user's."""
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    elsewhere = any(library["num_threads"] != 1 for library in libraries)
    with threadpool_limits(limits=1, user_api="blas") if elsewhere else nullcontext():
        yield


def hold_for_process() -> None:
    """Hold both for the rest of this process, unless they are in force already.

    Called by tasks in processes other than the fitting one: they take them with the first task. Tasks beside
    it wait until it has them: one that loads a library meanwhile could wait for ever; see `compiled_loops`.
    """
    if _HOLDERS.setting is None:
        hold = _Hold()
        hold.held.acquire()
        _HOLDERS.enter(hold)
