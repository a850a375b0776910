"""Live progress: one line in a terminal, one bar in a notebook."""

from __future__ import annotations

import html
import time
from typing import TYPE_CHECKING, Any, TextIO

from emtau_dask.em import IterationRecord
from emtau_dask.messages import shown
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.progress.tracking import Clock, Tracker, View, figures

if TYPE_CHECKING:
    from rich.console import RenderableType

A_SECOND = 8
"""How often a terminal is drawn."""
NOTEBOOK_SECONDS = 0.25
"""Between two drawings of a notebook's bar; each is a message to the browser."""
BAR = 12
"""Characters of a terminal's bar."""


class TerminalObserver:
    """One live line on a terminal: the pass, its share done and time left, the last iteration's figures.

    It is drawn a few times a second from what was last reported, so that a report costs next to
    nothing. `close` removes it.
    """

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tracker = Tracker()
        self._live = Live(
            console=Console(file=out),
            get_renderable=self._render,
            refresh_per_second=A_SECOND,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def stage(self, name: str, chunks: int) -> None:
        """Begin a new bar."""
        self._tracker.stage(name, chunks)

    def chunks_done(self, count: int) -> None:
        """Advance the bar."""
        self._tracker.chunks_done(count)

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Remember the figures of one iteration."""
        self._tracker.iteration(record)

    def note(self, message: str) -> None:
        """Print a remark above the display."""
        self._live.console.print(shown(message), markup=False, highlight=False)

    def close(self, *, done: bool) -> None:
        """Remove the display."""
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.text import Text

        view = self._tracker.view()
        full = round(view.share * BAR)
        first, *others = figures(view)
        line = Text(first, style="bold", no_wrap=True, overflow="ellipsis")
        line.append(f"  {'━' * full}", style="cyan")
        line.append(f"{'─' * (BAR - full)}  ", style="dim")
        return line.append("  ".join(others), style="not bold")


class NotebookObserver:
    """One bar in a notebook, drawn anew in its place.

    `close` leaves it as it was last, or says that the fit stopped there. Of a fit that ends before its first
    pass nothing is shown.

    Parameters
    ----------
    display : callable (object, display_id=True) -> handle
        IPython's; the handle has ``update(object)``.
    """

    def __init__(self, display: Any, clock: Clock = time.perf_counter) -> None:
        self._tracker = Tracker(clock)
        self._clock, self._drawn = clock, clock()
        self._notes: list[str] = []
        self._display = display
        self._handle: Any = None

    def stage(self, name: str, chunks: int) -> None:
        """Begin a new bar."""
        self._tracker.stage(name, chunks)
        self._draw()

    def chunks_done(self, count: int) -> None:
        """Advance the bar."""
        self._tracker.chunks_done(count)
        self._draw()

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Show the figures of one iteration."""
        self._tracker.iteration(record)
        self._draw()

    def note(self, message: str) -> None:
        """Show a remark below the bar."""
        self._notes.append(shown(message))
        self._draw(at_once=True)

    def close(self, *, done: bool) -> None:
        """Draw the bar a last time."""
        if not done:
            self._tracker.stop()
        if self._handle is not None:
            self._draw(at_once=True)

    def _draw(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if not at_once and self._handle is not None and now - self._drawn < NOTEBOOK_SECONDS:
            return
        self._drawn = now
        bar = _Bar(self._tracker.view(), tuple(self._notes))
        if self._handle is None:
            self._handle = self._display(bar, display_id=True)
        else:
            self._handle.update(bar)


class _Bar:
    """What a notebook shows of a view."""

    def __init__(self, view: View, notes: tuple[str, ...]) -> None:
        self._view, self._notes = view, notes

    def __repr__(self) -> str:
        return "\n".join(["  ".join(figures(self._view)), *self._notes])

    def _repr_html_(self) -> str:
        whole = '<span style="white-space: nowrap">{}</span>'.format
        said = " &nbsp; ".join(whole(html.escape(each)) for each in figures(self._view))
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self._notes)
        bar = f'<progress max="1" value="{self._view.share:.3f}"></progress>'
        return f"<div>{bar} &nbsp; {said}</div>{notes}"
