"""The progress display of a fit (a live line, a notebook's bar or plain lines) and its log."""

from __future__ import annotations

import html
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from rich.filesize import pick_unit_and_suffix

from emtau_dask.em.history import FitObserver, IterationRecord
from emtau_dask.errors import one_line, shown
from emtau_dask.mixture.parameters import MixtureParameters

if TYPE_CHECKING:
    from rich.text import Text

LOG = logging.getLogger("emtau_dask.fit")
LONG_PASS = 30.0
"""Interval between two lines of one pass (seconds)."""
NOTEBOOK_SECONDS = 0.25
"""Minimum interval between two drawings of a notebook's bar (seconds); each is a message to the browser."""
BAR = 12
"""Length of a terminal's bar (characters)."""


class Progress:
    """Tracks the progress of a fit, logs it, and shows it on a display. Threads may share it.

    Lines of stages, remarks and accepted passes over all rows are logged at level INFO, others at DEBUG. A
    report of chunks takes a lock, adds a number and reads the clock.
    """

    def __init__(
        self, display: Display | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._display, self._clock, self._lock = display or Display(), clock, threading.Lock()
        self._began = self._pass_began = clock()
        self._next_line = self._began + LONG_PASS
        self._stage, self._chunks, self._done = "starting", 0, 0
        self._record: IterationRecord | None = None
        self._stopped = False
        self._display.start(self)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def stage(self, name: str, chunks: int) -> None:
        """Begin a pass; its line is its name. An iteration has its line at its end."""
        with self._lock:
            self._stage, self._chunks, self._done, self._pass_began = name, chunks, 0, self._clock()
        if not name.startswith("iteration "):
            self._line(logging.INFO, f"{name}: {_chunk_count(chunks)}")
        self._display.draw()

    def chunks_done(self, count: int) -> None:
        """Count chunks."""
        with self._lock:
            self._done += count
        if self._clock() >= self._next_line:
            _, (stage, *others), _ = self.figures()
            self._line(logging.DEBUG, f"{stage}: {', '.join(others)}")
        self._display.draw()

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Remember an iteration, and log its line."""
        before, self._record = self._record, record
        follows = before is not None and record.iteration == before.iteration + 1
        change = record.lower_bound - before.lower_bound if before and follows else math.nan
        total = record.chunks_processed + record.chunks_skipped
        self._line(
            logging.INFO if record.full_pass and record.accepted else logging.DEBUG,
            f"iteration {record.iteration}: bound {record.lower_bound:.9g}, "
            f"change {_number(change, '+.2e')}, gap {_number(record.gap, '.1e')}, "
            f"active {_active(record)}, chunks {record.chunks_processed:,}/{total:,}, "
            f"{record.seconds:.3g} s, {_rate(record)}{'' if record.accepted else ', refused'}",
        )
        self._display.draw()

    def note(self, message: str) -> None:
        """Log and show a remark."""
        LOG.info("%s", one_line(message))
        self._display.note(message)

    def close(self, *, done: bool) -> None:
        """End the display, which says if the fit failed or was stopped."""
        self._stopped = not done
        self._display.stop()

    def figures(self) -> tuple[float, list[str], list[str]]:
        """Return the share of the pass that is done, texts on the pass, and texts on the fit."""
        with self._lock:
            share = min(self._done / self._chunks, 1.0) if self._chunks else 0.0
            of_pass = [f"stopped in {self._stage}" if self._stopped else self._stage]
            of_pass.append(f"{share:.0%} of {_chunk_count(self._chunks)}")
            if 0.0 < share < 1.0 and not self._stopped:
                left = (self._clock() - self._pass_began) * (1.0 - share) / share
                of_pass.append(f"{_clock_time(left)} left")
        of_fit = [_clock_time(self.seconds)]
        if (record := self._record) is not None:
            bound, gap = f"bound {record.lower_bound:.7g}", f"gap {_number(record.gap, '.1e')}"
            of_fit = [bound, gap, f"active {_active(record)}", _rate(record), *of_fit]
        return share, of_pass, of_fit

    def _line(self, level: int, text: str) -> None:
        self._next_line = self._clock() + LONG_PASS
        LOG.log(level, "%s", one_line(text))
        self._display.line(text)


class Display:
    """A display of progress. The base class shows nothing; others override its methods."""

    progress: Progress

    def start(self, progress: Progress) -> None:
        """Begin."""
        self.progress = progress

    def line(self, text: str) -> None:
        """Show the beginning of a stage, the end of an iteration, or the progress of a long pass."""

    def note(self, text: str) -> None:
        """Show a remark."""
        self.line(text)

    def draw(self) -> None:
        """Show the progress of the pass; called for every report."""

    def stop(self) -> None:
        """End."""


class Lines(Display):
    """Plain lines on a stream, which is flushed after each and not closed.

    An error in writing, such as a full disk, does not end the fit; a closed pipe does.
    """

    def __init__(self, out: TextIO) -> None:
        self._out, self._writing = out, threading.Lock()

    def line(self, text: str) -> None:
        """Write a line."""
        with self._writing:
            try:
                self._out.write(f"{one_line(text)}\n")
                self._out.flush()
            except OSError as error:
                if isinstance(error, BrokenPipeError):
                    raise


class TerminalLine(Display):
    """One live line on a terminal, drawn eight times a second by a thread, with remarks above it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def start(self, progress: Progress) -> None:
        """Show the line."""
        from rich.console import Console
        from rich.live import Live

        super().start(progress)
        self._live = Live(
            console=Console(file=self._out),
            get_renderable=self._render,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def note(self, text: str) -> None:
        """Print a remark above the line."""
        self._live.console.print(shown(text), markup=False, highlight=False)

    def stop(self) -> None:
        """Remove the line."""
        self._live.stop()

    def _render(self) -> Text:
        from rich.text import Text

        share, (stage, *others), of_fit = self.progress.figures()
        full = round(share * BAR)
        bar = ("━" * full, "cyan"), ("─" * (BAR - full), "dim")
        texts = "  ".join([*others, *of_fit])
        return Text.assemble((stage, "bold"), "  ", *bar, "  ", texts, no_wrap=True, overflow="ellipsis")


class NotebookBar(Display):
    """One bar in a notebook, redrawn in its place, with remarks below; nothing before the first pass.

    Parameters
    ----------
    display : callable (dict, raw=True, display_id=True) -> handle
        IPython's; the handle has ``update(dict, raw=True)``. The texts are by MIME type.
    """

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._notes: list[str] = []
        self._next = 0.0

    def note(self, text: str) -> None:
        """Draw the bar with one more remark."""
        self._notes.append(shown(text))
        self._show()

    def draw(self) -> None:
        """Draw the bar if the interval has passed."""
        if self.progress.seconds >= self._next:
            self._show()

    def stop(self) -> None:
        """Draw the final bar."""
        if self._handle is not None:
            self._show()

    def _show(self) -> None:
        self._next = self.progress.seconds + NOTEBOOK_SECONDS
        share, of_pass, of_fit = self.progress.figures()
        texts = [*of_pass, *of_fit]
        spans = [f'<span style="white-space: nowrap">{html.escape(text)}</span>' for text in texts]
        bar = f'<progress max="1" value="{share:.3f}"></progress>'
        notes = "".join(f"<div>{html.escape(note)}</div>" for note in self._notes)
        drawn = {
            "text/plain": "\n".join(["  ".join(texts), *self._notes]),
            "text/html": f"<div>{' &nbsp; '.join([bar, *spans])}</div>{notes}",
        }
        if self._handle is None:
            self._handle = self._display(drawn, raw=True, display_id=True)
        else:
            self._handle.update(drawn, raw=True)


def observer_for(verbose: int, out: TextIO | None = None) -> Progress:
    """Return an observer that logs and, unless verbose is 0, shows progress on a stream.

    If the log goes to that stream, there is no display.

    Parameters
    ----------
    verbose : int
    out : text stream, optional
        By default standard output: in a notebook a bar, in a terminal a live line, else plain lines.
    """
    stream = out or sys.stdout
    if not verbose or stream is None:
        return Progress()
    if out is None and (display := _display_of_notebook()) is not None:
        return Progress(NotebookBar(display))
    handlers = logging.getLogger("emtau_dask").handlers
    if any(getattr(handler, "stream", None) is stream for handler in handlers):
        return Progress()
    return Progress(TerminalLine(stream) if stream.isatty() else Lines(stream))


@contextmanager
def closed_after(observer: FitObserver) -> Iterator[FitObserver]:
    """Yield an observer, and close it after the block with ``done``: whether the block had no error."""
    done = False
    try:
        yield observer
        done = True
    finally:
        observer.close(done=done)


def watching(out: TextIO) -> AbstractContextManager[FitObserver]:
    """Yield an observer that shows progress on ``out`` until the block ends."""
    return closed_after(observer_for(1, out))


def _chunk_count(chunks: int) -> str:
    return f"{chunks:,} chunk{'' if chunks == 1 else 's'}"


def _number(value: float, form: str) -> str:
    """Return a formatted number, "-" if it is not finite."""
    return format(value, form) if math.isfinite(value) else "-"


def _active(record: IterationRecord) -> str:
    """Return the share of the rows that an iteration scored."""
    return f"{min(1.0, record.active_rows / record.rows):.1%}" if record.rows else "0.0%"


def _rate(record: IterationRecord) -> str:
    """Return the rows that an iteration scored a second."""
    a_second = record.active_rows / record.seconds if record.seconds else 0.0
    size, prefix = pick_unit_and_suffix(int(a_second), ["", "k", "M", "G"], 1000)
    return f"{a_second / size:.3g}{prefix} rows/s"


def _clock_time(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=int(seconds)))


def _display_of_notebook() -> Any:
    """Return IPython's ``display`` in a notebook's kernel, None elsewhere."""
    ipython = sys.modules.get("IPython")  # a notebook has imported it
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return None
    from IPython.display import display

    return display
