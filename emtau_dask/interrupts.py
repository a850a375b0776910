"""Interruption of a computation by Ctrl-C and SIGTERM, and threads that can be interrupted while waiting.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. If that happens inside
Python's own waiting, a lock may stay locked, and another thread waits for it without end. So the handler of
the command line (`handler_of_signals`) raises nothing inside `interruptible`: it records the signal, and
`look` raises the interrupt while the main thread waits for tasks, and between chunks. In Python, whose own
handler raises at once, only the resulting errors are corrected.

An interrupt may happen anywhere in `concurrent.futures` and `queue`, and leave one of their locks locked.
Their threads then wait for it without end, and so does the interpreter when it ends. So the waiting thread
here, mostly the main one, uses single calls of C (`queue.SimpleQueue`), which an interrupt cannot split;
and no thread keeps the interpreter from ending.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
LOOK_SECONDS = 0.1
"""Interval at which the waiting main thread looks for a signal (seconds)."""
LEAVE_SECONDS = 1.0
"""Maximum wait of an interrupt for calls that have begun (seconds)."""


class _Signals:
    """The state of signals in the main thread.

    Attributes
    ----------
    depth : int
        Number of nested `interruptible` blocks.
    received : bool
        Whether a signal was received.
    pending : bool
        Whether an interrupt must still be raised for it.
    """

    def __init__(self) -> None:
        self.depth, self.received, self.pending = 0, False, False


_SIGNALS = _Signals()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _handle_signal(*_: object) -> None:
    if not _SIGNALS.received:
        _SIGNALS.received = _SIGNALS.pending = True
        if not _SIGNALS.depth:
            look()


def handler_of_signals() -> Callable[..., None]:
    """Return a handler for the main thread that raises an interrupt for the first signal from now on.

    Later signals would disturb the work after the interrupt.
    """
    _SIGNALS.received = _SIGNALS.pending = False
    return _handle_signal


def look() -> None:
    """Raise `KeyboardInterrupt` in the main thread, once, if a signal was received."""
    if _SIGNALS.pending and _is_main():
        _SIGNALS.pending = False
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal interrupt the block when it calls `look`, at the latest when it ends.

    An error that an interrupt caused, for example in a future of dask, is raised as the interrupt, and so is
    one after a signal.
    """
    depth, handled = int(_is_main()), sys.exc_info()[1]
    _SIGNALS.depth += depth
    try:
        yield
    except Exception as error:
        look()  # The signal may have ended a process that the block needs.
        if _is_interrupt(error, handled):
            raise KeyboardInterrupt from error
        raise
    finally:
        _SIGNALS.depth -= depth
    look()


@contextmanager
def interruptible_at_once() -> Iterator[None]:
    """Within `interruptible`: let a signal interrupt the block at any instruction."""
    if not _is_main():
        yield
        return
    depth, _SIGNALS.depth = _SIGNALS.depth, 0
    try:
        look()
        yield
    finally:
        _SIGNALS.depth = depth


def interrupt_with_text(note: str) -> KeyboardInterrupt:
    """Return an interrupt with a note.

    Raise it from None: the traceback of the interrupted code, in a notebook hundreds of lines of dask and
    other threads, would hide the note.
    """
    interrupt = KeyboardInterrupt()
    interrupt.add_note(note)
    return interrupt


class Stop:
    """A flag that ends the tasks of a pass; each checks it before it begins, and between chunks."""

    def __init__(self) -> None:
        self.asked = False

    def look(self) -> None:
        """Raise `KeyboardInterrupt` if they must end, or if the main thread received a signal."""
        if self.asked:
            raise KeyboardInterrupt
        if _SIGNALS.pending:
            look()


class Threads:
    """Threads that make given calls, in order.

    Parameters
    ----------
    most : int
        Maximum threads; one more begins with each call for which none is idle.
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
        """Let a thread make a call, which must not raise."""
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
            del call  # And all that it refers to, while the thread is idle.
            self._idle.put(None)
        self._given.put(None)  # For the next thread.

    def end(self, seconds: float = math.inf) -> None:
        """End the threads after their calls; wait at most ``seconds``."""
        self._given.put(None)
        limit = time.monotonic() + seconds
        for thread in self._begun:
            thread.join(None if seconds == math.inf else max(0.0, limit - time.monotonic()))


def _is_interrupt(error: BaseException | None, handled: BaseException | None) -> bool:
    """Return whether an interrupt caused an error; `Thread.start` may convert one to a RuntimeError.

    An interrupt that the caller already ``handled`` when the block began does not count: a fit may be resumed
    after an interrupt.
    """
    while error is not None and error is not handled and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None and error is not handled


class Calls(Generic[K, T]):
    """Calls of one computation, each with a key; one thread takes their results as they come.

    If an error leaves its context, no more calls begin, and those that have begun are waited for, since their
    writes must end before files are removed. After an interrupt the wait is a second at most.

    Parameters
    ----------
    submit : callable (callable) -> object
        Lets some thread make a call, or makes it.
    stop : Stop
        Is set in these cases; long calls check it.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], Any], stop: Stop) -> None:
        self._submit, self._stop = submit, stop
        self._begun: list[K] = []
        self._ended: SimpleQueue[tuple[K, T | None, BaseException | None]] = SimpleQueue()
        self._n_taken = 0
        self._handled = sys.exc_info()[1]

    def __enter__(self) -> Calls[K, T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        self._stop.asked = True
        interrupted = _is_interrupt(error, self._handled)
        limit = time.monotonic() + LEAVE_SECONDS if interrupted else math.inf
        while self._n_taken < len(self._begun) and time.monotonic() < limit:
            self._next()
        if interrupted and isinstance(error, Exception):
            raise KeyboardInterrupt from error

    def begin(self, key: K, call: Callable[[], T]) -> None:
        """Let the threads make a call; it sees this thread's context variables."""
        self._submit(partial(copy_context().run, self.make, key, call))

    def make(self, key: K, call: Callable[[], T]) -> None:
        """Make a call in this thread."""
        self._begun.append(key)  # Before it looks: `__exit__` reads both in the other order.
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
