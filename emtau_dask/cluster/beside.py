"""A thread that looks after something while a block runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def looking(look: Callable[[threading.Event], None], name: str, leave_seconds: float) -> Iterator[None]:
    """Run ``look`` in a thread beside the block.

    It is given the event that the block is over, after which it is waited for so long: it may wait for a
    scheduler that is gone.
    """
    over = threading.Event()
    thread = threading.Thread(target=look, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(leave_seconds)
