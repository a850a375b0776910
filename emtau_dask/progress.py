"""The progress display of a fit (a live line, a notebook's bar or plain lines) and its log."""

from __future__ import annotations

import html
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TextIO

from rich.filesize import pick_unit_and_suffix

from emtau_dask.em.history import FitObserver, IterationRecord
from emtau_dask.errors import counted, one_line, shown
from emtau_dask.mixture.parameters import MixtureParameters

if TYPE_CHECKING:
    from rich.text import Text

LOG = logging.getLogger("emtau_dask.fit")
LONG_PASS = 30.0
"""Interval between two lines of one pass (seconds)."""
NOTEBOOK_SECONDS = 0.25
"""Minimum interval between two drawings of a notebook's bar (seconds); each is a message to the browser."""
BAR = 8
"""Length of a terminal's bar (characters)."""


@dataclass
class _Part:
    """A part of a fit with its last record, or all parts that are compared with the best one's."""

    name: str
    began: float
    record: IterationRecord | None = None
    iterations: int = 0


class Progress:
    """Tracks the progress of a fit, logs it, and shows it on a display. Threads may share it.

    A fit has parts, such as its starts. A part has a line when it ends, and parts that are compared have one
    together; their own lines, passes and iterations are details. Accepted passes over all rows are logged at
    level INFO, other iterations at DEBUG. A report of chunks takes a lock, adds a number and reads the clock.
    """

    def __init__(
        self, display: Display | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._display, self._clock, self._lock = display or Display(), clock, threading.Lock()
        self._began = self._pass_began = clock()
        self._next_line = self._began + LONG_PASS
        self._part, self._compared = _Part("", self._began), _Part("", self._began)
        self._stage, self._chunks, self._done = "starting", 0, 0
        self._stopped = False
        self._display.start(self)

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    def part(self, name: str, compared: str = "") -> None:
        """Begin a part of a fit; what ends before gets its line."""
        self._end_part()
        if compared != self._compared.name:
            self._end_compared()
            self._compared = _Part(compared, self._clock())
        with self._lock:
            self._part = _Part(name, self._clock())
            self._stage, self._chunks, self._done = "", 0, 0

    def left_out(self) -> None:
        """Forget the record of the part that ends."""
        self._part.record = None

    def stage(self, name: str, chunks: int) -> None:
        """Begin a pass; its line is its name. An iteration has its line at its end."""
        with self._lock:
            self._stage, self._chunks, self._done, self._pass_began = name, chunks, 0, self._clock()
        if not name.startswith("iteration "):
            self._line(logging.INFO, f"{name}: {counted(chunks, 'chunk')}", detail=bool(self._part.name))
        self._display.draw()

    def chunks_done(self, count: int) -> None:
        """Count chunks."""
        with self._lock:
            self._done += count
        if self._clock() >= self._next_line:
            _, (stage, *others) = self.figures()
            self._line(logging.DEBUG, f"{stage}: {', '.join(others)}")
        self._display.draw()

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Remember an iteration, and log its line."""
        part, before = self._part, self._part.record
        part.iterations += 1
        part.record = record if record.accepted else before or record
        chunks = record.chunks_processed + record.chunks_skipped
        follows = before is not None and record.iteration == before.iteration + 1
        changed = f"changed by {record.lower_bound - before.lower_bound:+.2e}" if before and follows else ""
        texts = (
            _log_likelihood(record, 9),
            changed,
            _still_to_gain(record),
            "" if record.accepted else "refused",
            f"rows scored: {record.active_rows / record.rows:.3g} passes",
            f"{record.chunks_processed:,} of {counted(chunks, 'chunk')}",
            f"{record.seconds:.3g} s",
            _rate(record),
        )
        level = logging.INFO if record.full_pass and record.accepted else logging.DEBUG
        text = f"iteration {record.iteration}: {', '.join(filter(None, texts))}"
        self._line(level, text, detail=True)
        self._display.draw()

    def note(self, message: str) -> None:
        """Log and show a remark."""
        LOG.info("%s", one_line(message))
        self._display.note(message)

    def close(self, *, done: bool) -> None:
        """End the display, which says if the fit failed or was stopped."""
        self._stopped = not done
        if done:
            self._end_part()
            self._end_compared()
        self._display.stop()

    def figures(self) -> tuple[float, list[str]]:
        """Return the share of the pass that is done, and texts, the most important ones first.

        How many iterations a fit takes is not known, so within one no time is said to be left.
        """
        with self._lock:
            share = min(self._done / self._chunks, 1.0) if self._chunks else 0.0
            part, record = self._part.name, self._part.record
            where, within = (part, self._stage) if part else (self._stage, "")
            if self._stopped:
                where, within = f"stopped in {', '.join(filter(None, (where, within)))}", ""
            of_fit = _log_likelihood(record, 6), within, _still_to_gain(record)
            texts = [where, _clock_time(self.seconds), *filter(None, of_fit)]
            if self._chunks:
                texts.append(f"{share:.0%} of {counted(self._chunks, 'chunk')}")
            if 0.0 < share < 1.0 and not self._stopped and not part:
                left = (self._clock() - self._pass_began) * (1.0 - share) / share
                texts.append(f"{_clock_time(left)} left")
            elif record is not None:
                texts.append(_rate(record))
        return share, texts

    def _end_part(self) -> None:
        """Give the part that ends its line, and compare it."""
        part, best = self._part, self._compared
        if part.record is not None and best.name:
            best.iterations += part.iterations
            if best.record is None or part.record.lower_bound > best.record.lower_bound:
                best.record = part.record
        self._line_of(part, detail=bool(best.name))

    def _end_compared(self) -> None:
        self._line_of(self._compared)

    def _line_of(self, part: _Part, *, detail: bool = False) -> None:
        """Give a part its line, once, if it had iterations."""
        if part.name and part.record is not None and part.iterations:
            likelihood, took = _log_likelihood(part.record, 7), self._clock() - part.began
            iterations = counted(part.iterations, "iteration")
            taken = "" if took < 1 else f", {took:.0f} s" if took < 60 else f", {_clock_time(took)}"
            self._line(logging.INFO, f"{part.name}: {likelihood}, {iterations}{taken}", detail=detail)
            part.iterations = 0

    def _line(self, level: int, text: str, *, detail: bool = False) -> None:
        LOG.log(level, "%s", one_line(text))
        if self._display.details or not detail:
            self._next_line = self._clock() + LONG_PASS
            self._display.line(text)


class Display:
    """A display of progress. The base class shows nothing; others override its methods.

    Attributes
    ----------
    details : bool
        Whether lines of passes and iterations within the parts of a fit are shown, too.
    """

    progress: Progress
    details = False

    def start(self, progress: Progress) -> None:
        """Begin."""
        self.progress = progress

    def line(self, text: str) -> None:
        """Show the end of a part or an iteration, the beginning of a pass, or the progress of a long one."""

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

    def __init__(self, out: TextIO, *, details: bool = False) -> None:
        self._out, self.details, self._writing = out, details, threading.Lock()

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
    """One live line on a terminal, drawn eight times a second by a thread; remarks and details above it."""

    def __init__(self, out: TextIO, *, details: bool = False) -> None:
        self._out, self.details = out, details

    def start(self, progress: Progress) -> None:
        """Show the line."""
        from rich.console import Console
        from rich.live import Live

        super().start(progress)
        self._console = Console(file=self._out)
        self._live = Live(
            console=self._console,
            get_renderable=self._render,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def line(self, text: str) -> None:
        """Print a line above the live one, if details are asked for."""
        if self.details:
            self.note(text)

    def note(self, text: str) -> None:
        """Print a remark above the line."""
        self._console.print(shown(text), markup=False, highlight=False)

    def stop(self) -> None:
        """Remove the line."""
        self._live.stop()

    def _render(self) -> Text:
        from rich.text import Text

        share, (stage, *texts) = self.progress.figures()
        full = round(share * BAR)
        bar = ("━" * full, "cyan"), ("─" * (BAR - full), "dim")
        line = Text.assemble((stage, "bold"), "  ", *bar, no_wrap=True, overflow="ellipsis")
        for text in texts:
            if line.cell_len + 2 + len(text) > self._console.width:
                break
            line.append(f"  {text}")
        return line


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
        share, texts = self.progress.figures()
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
        From 2 every iteration has a line, except in a notebook.
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
    kind = TerminalLine if stream.isatty() else Lines
    return Progress(kind(stream, details=verbose > 1))


@contextmanager
def closed_after(observer: FitObserver) -> Iterator[FitObserver]:
    """Yield an observer, and close it after the block with ``done``: whether the block had no error."""
    done = False
    try:
        yield observer
        done = True
    finally:
        observer.close(done=done)


def _log_likelihood(record: IterationRecord | None, digits: int) -> str:
    return "" if record is None else f"log-likelihood per row {record.lower_bound:.{digits}g}"


def _still_to_gain(record: IterationRecord | None) -> str:
    """Return how much a fit could still gain, for people; "" if there is no estimate."""
    return "" if record is None or math.isnan(record.gap) else f"could still gain {record.gap:.1e}"


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
