"""Where Ctrl-C and SIGTERM end a computation.

Python raises `KeyboardInterrupt` between any two instructions of the main thread. Where that falls into
Python's own waiting, a lock may stay taken, and another thread waits for it without end. So the handler of
the command line (`handler_of_signals`) raises nothing inside `interruptible`: it notes the signal, and `look`
raises the interrupt where the main thread waits for tasks, and between chunks. In Python, whose own handler
raises at once, only what comes out is set right.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Signals:
    """What the main thread has to know of signals.

    Attributes
    ----------
    held : int
        In how many blocks of `interruptible` it is.
    heard : bool
        Whether one came.
    due : bool
        Whether an interrupt is to be raised for it yet.
    """

    def __init__(self) -> None:
        self.held, self.heard, self.due = 0, False, False


_SIGNALS = _Signals()


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


def _heed(*_: object) -> None:
    if not _SIGNALS.heard:
        _SIGNALS.heard = _SIGNALS.due = True
        if not _SIGNALS.held:
            look()


def handler_of_signals() -> Callable[..., None]:
    """Return a handler for the main thread: of all signals from now on, it lets the first interrupt.

    Others would fall into what is done after the interrupt.
    """
    _SIGNALS.heard = _SIGNALS.due = False
    return _heed


def look() -> None:
    """Raise `KeyboardInterrupt` in the main thread, once, if a signal came."""
    if _SIGNALS.due and _is_main():
        _SIGNALS.due = False
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a signal interrupt the block where it looks, at the latest when it ends."""
    held = int(_is_main())
    _SIGNALS.held += held
    try:
        yield
    finally:
        _SIGNALS.held -= held
    look()


@contextmanager
def interruptible_at_once() -> Iterator[None]:
    """Within `interruptible`: let a signal end the block, which never looks, wherever it is."""
    if not _is_main():
        yield
        return
    held, _SIGNALS.held = _SIGNALS.held, 0
    try:
        look()
        yield
    finally:
        _SIGNALS.held = held


def interrupt_saying(note: str) -> KeyboardInterrupt:
    """Return an interrupt with a note.

    It is to be raised from None: the traceback of what was interrupted, hundreds of lines of dask's and of
    other threads' in a notebook, would hide the note.
    """
    interrupt = KeyboardInterrupt()
    interrupt.add_note(note)
    return interrupt


class Stop:
    """Whether the tasks of a pass are to end: each looks before it begins, and between chunks."""

    def __init__(self) -> None:
        self.asked = False

    def look(self) -> None:
        """Raise `KeyboardInterrupt` where they are, or where a signal came in the main thread."""
        if self.asked:
            raise KeyboardInterrupt
        look()
