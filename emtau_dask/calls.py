"""Calls side by side in threads of this process.

An interrupt may fall anywhere into `concurrent.futures` and `queue`, and leave a lock of theirs taken. Their
threads then wait for it without end, and the interpreter for them when it ends. So the thread that waits
here, mostly the main one, does so by single calls of C (`queue.SimpleQueue`), which an interrupt ends whole;
and no thread keeps the interpreter from ending.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from emtau_dask.interrupts import Stop, look

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
LOOK_SECONDS = 0.1
"""How often the main thread looks for a signal while it waits."""
LEAVE_SECONDS = 1.0
"""How long an interrupt waits for calls that have begun."""


class Threads:
    """Threads that make the calls they are given, in order.

    Parameters
    ----------
    most : int
        How many there may be; one more begins with each call for which none is idle.
    name : str
        Their names begin with it.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle: SimpleQueue[None] = SimpleQueue()
        self._begun: list[threading.Thread] = []
        self._beginning = threading.Lock()

    def submit(self, call: Callable[[], None]) -> None:
        """Have a thread make a call, which must not raise."""
        self._given.put(call)
        try:
            self._idle.get_nowait()
        except Empty:
            with self._beginning:
                if len(self._begun) < self._most:
                    name = f"{self._name}-{len(self._begun)}"
                    thread = threading.Thread(target=self._serve, name=name, daemon=True)
                    thread.start()
                    self._begun.append(thread)

    def _serve(self) -> None:
        while (call := self._given.get()) is not None:
            call()
            del call  # With all that it holds, while nothing else is to be done.
            self._idle.put(None)
        self._given.put(None)  # For the next thread.

    def end(self, seconds: float = math.inf) -> None:
        """End the threads after the calls they were given; wait for them so long at most."""
        self._given.put(None)
        limit = time.monotonic() + seconds
        for thread in self._begun:
            thread.join(None if seconds == math.inf else max(0.0, limit - time.monotonic()))


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt brought an error about; `Thread.start` may make a RuntimeError of one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


class Calls(Generic[K, T]):
    """Calls of one computation, each with a key, whose results one thread takes as they come.

    On leaving its context by an error no call begins any more, and those that have begun are waited for: they
    may write, which has to end before anything is cleared away. After an interrupt that is a second at most.

    Parameters
    ----------
    submit : callable (callable) -> object
        Has a call made by some thread, or makes it.
    stop : Stop
        Is asked for then; calls that take long look at it.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], Any], stop: Stop) -> None:
        self._submit, self._stop = submit, stop
        self._begun: list[K] = []
        self._ended: SimpleQueue[tuple[K, T | None, BaseException | None]] = SimpleQueue()
        self._n_taken = 0

    def __enter__(self) -> Calls[K, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        self._stop.asked = True
        interrupted = _is_interrupt(error)
        limit = time.monotonic() + LEAVE_SECONDS if interrupted else math.inf
        while self._n_taken < len(self._begun) and time.monotonic() < limit:
            self._next()
        if interrupted and isinstance(error, Exception):
            raise KeyboardInterrupt from error

    def begin(self, key: K, call: Callable[[], T]) -> None:
        """Have a call made by the threads; it sees this thread's context variables."""
        self._submit(partial(copy_context().run, self.make, key, call))

    def make(self, key: K, call: Callable[[], T]) -> None:
        """Make a call in this thread."""
        self._begun.append(key)  # Before it looks: who stops the calls looks in the other order.
        try:
            self._stop.look()
            self._ended.put((key, call(), None))
        except BaseException as error:
            self._ended.put((key, None, error))

    def take(self) -> tuple[K, T]:
        """Return the key of a call that has ended and what it returned, or raise what it raised."""
        look()
        while (ended := self._next()) is None:
            look()
        key, value, error = ended
        if error is None:
            return key, cast("T", value)
        try:
            raise error
        finally:
            ended = error = None  # They hold this frame.

    def _next(self) -> tuple[K, T | None, BaseException | None] | None:
        try:
            ended = self._ended.get(timeout=LOOK_SECONDS)
        except Empty:
            return None
        self._n_taken += 1
        return ended
