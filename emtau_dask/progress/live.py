"""Live progress: one line in a terminal, one bar in a notebook; and which display suits a stream."""

from __future__ import annotations

import html
import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from emtau_dask.em import FitObserver, SilentObserver
from emtau_dask.messages import shown
from emtau_dask.progress.lines import Clock, Lines, Progress, to_stream

if TYPE_CHECKING:
    from rich.console import RenderableType

A_SECOND = 8
"""How often a terminal is drawn."""
NOTEBOOK_SECONDS = 0.25
"""Between two drawings of a notebook's bar; each is a message to the browser."""
BAR = 12
"""Characters of a terminal's bar."""


class TerminalLine(Progress):
    """One live line on a terminal, drawn a few times a second by a thread; `close` removes it."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._live = Live(
            console=Console(file=out),
            get_renderable=self._render,
            refresh_per_second=A_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def note(self, message: str) -> None:
        """Print a remark above the display."""
        self._live.console.print(shown(message), markup=False, highlight=False)

    def close(self, *, done: bool) -> None:
        """Remove the display."""
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.text import Text

        share, (first, *others) = self._figures()
        full = round(share * BAR)
        line = Text(first, style="bold", no_wrap=True, overflow="ellipsis")
        line.append(f"  {'━' * full}", style="cyan")
        line.append(f"{'─' * (BAR - full)}  ", style="dim")
        return line.append("  ".join(others), style="not bold")


class NotebookBar(Progress):
    """One bar in a notebook, drawn anew in its place.

    `close` leaves it as it was last, or says that the fit stopped there. Of a fit that ends before its first
    pass nothing is shown.

    Parameters
    ----------
    display : callable (dict, raw=True, display_id=True) -> handle
        IPython's; the handle has ``update(dict, raw=True)``. The texts are by MIME type.
    """

    def __init__(self, display: Any, clock: Clock = time.perf_counter) -> None:
        super().__init__(clock)
        self._display: Any = display
        self._handle: Any = None
        self._notes: list[str] = []
        self._next = -math.inf

    def note(self, message: str) -> None:
        """Show a remark below the bar."""
        self._notes.append(shown(message))
        self._draw()

    def close(self, *, done: bool) -> None:
        """Draw the bar a last time."""
        super().close(done=done)
        if self._handle is not None:
            self._draw()

    def _draw(self) -> None:
        self._next = self._clock() + NOTEBOOK_SECONDS
        share, said = self._figures()
        spans = (f'<span style="white-space: nowrap">{html.escape(each)}</span>' for each in said)
        bar = f'<progress max="1" value="{share:.3f}"></progress> &nbsp; {" &nbsp; ".join(spans)}'
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self._notes)
        drawn = {
            "text/plain": "\n".join(["  ".join(said), *self._notes]),
            "text/html": f"<div>{bar}</div>{notes}",
        }
        if self._handle is None:
            self._handle = self._display(drawn, raw=True, display_id=True)
        else:
            self._handle.update(drawn, raw=True)


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
        return NotebookBar(display)
    stream = out or sys.stdout
    if _logged_to(stream):
        return SilentObserver()
    return TerminalLine(stream) if stream.isatty() else Lines(to_stream(stream))


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
