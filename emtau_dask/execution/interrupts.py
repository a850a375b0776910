"""Interrupts that come out as what they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_as_they_are() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in place of an error that an interrupt brought about.

    One that falls into Python's own waiting leaves its locks half taken: what comes out is
    "release unlocked lock", or an InvalidStateError of a future.
    """
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            cause = cause.__context__
        raise


def interrupt_saying(note: str) -> KeyboardInterrupt:
    """Return an interrupt with a note.

    It is to be raised from None: the traceback of what was interrupted, hundreds of lines of dask's and of
    other threads' in a notebook, would hide the note.
    """
    interrupt = KeyboardInterrupt()
    interrupt.add_note(note)
    return interrupt
