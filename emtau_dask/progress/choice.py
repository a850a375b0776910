"""Which display suits a stream."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from emtau_dask.em import FitObserver, SilentObserver
from emtau_dask.progress.lines import LineObserver
from emtau_dask.progress.live import NotebookObserver, TerminalObserver


def observer_for(verbose: int, out: TextIO | None = None) -> FitObserver:
    """Return the display that suits a stream; a silent one if verbose is 0, or if the log goes there already.

    Parameters
    ----------
    verbose : int
    out : text stream, optional
        By default standard output: in a notebook a bar, in a terminal a live line, else plain lines.
    """
    if not verbose:
        return SilentObserver()
    display = _display_of_notebook() if out is None else None
    if display is not None:
        return NotebookObserver(display)
    stream = out or sys.stdout
    if _logged_to(stream):
        return SilentObserver()
    return TerminalObserver(stream) if stream.isatty() else LineObserver(stream)


@contextmanager
def closed_after(observer: FitObserver) -> Iterator[FitObserver]:
    """Give the block an observer, and close it with the block; it is told whether that came to its end."""
    done = False
    try:
        yield observer
        done = True
    finally:
        observer.close(done=done)


@contextmanager
def watching(out: TextIO) -> Iterator[FitObserver]:
    """Give the block an observer that shows progress on ``out`` until the block ends."""
    with closed_after(observer_for(1, out)) as observer:
        yield observer


def _logged_to(stream: TextIO) -> bool:
    """Return whether the package's own log goes to a stream, where it would say the same once more."""
    handlers = logging.getLogger("emtau_dask").handlers
    return any(getattr(handler, "stream", None) is stream for handler in handlers)


def _display_of_notebook() -> Any:
    """Return IPython's ``display`` in a notebook's kernel, None elsewhere."""
    ipython = sys.modules.get("IPython")  # in a notebook it is there
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import display

    return display
