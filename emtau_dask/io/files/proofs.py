"""What a process proves once, and remembers: that it sees what another process saw."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable

REMEMBERED = 256
"""Proofs that a process remembers; one that it has forgotten is made again."""

_settled: dict[str, None] = {}
_settling = threading.RLock()


def _begin_anew() -> None:
    """Leave a lock behind that another thread may have held when this process was forked."""
    global _settling
    _settling = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


def once(token: str, prove: Callable[[], None]) -> None:
    """Call ``prove`` unless this process has come through it already; other threads wait for it.

    Parameters
    ----------
    token : str
        Stands for what is proved.
    prove : callable () -> None
        Raises where it cannot be.
    """
    if token in _settled:
        return
    with _settling:
        if token not in _settled:
            prove()
            settle(token)


def settle(token: str) -> None:
    """Take what ``token`` stands for as proved in this process."""
    with _settling:
        _settled[token] = None
        while len(_settled) > REMEMBERED:
            del _settled[next(iter(_settled))]


def this_process() -> str:
    """Return what a person would call this process: a worker by its address."""
    distributed = sys.modules.get("distributed")
    if distributed is not None:
        try:
            return f"the worker {distributed.get_worker().address}"
        except ValueError:
            pass
    return f"process {os.getpid()} on {platform.node()}"
