"""What a person sees while a fit runs: a live display, plain lines, or a log."""

from __future__ import annotations

import errno
import html
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from emtau_dask.em.history import FitObserver, IterationRecord, SilentObserver
from emtau_dask.errors import one_line, shown
from emtau_dask.mixture.parameters import MixtureParameters

if TYPE_CHECKING:
    from rich.console import RenderableType


LOG = logging.getLogger("emtau_dask.fit")
Clock = Callable[[], float]
LONG_PASS = 30.0
"""Seconds between two lines of one pass."""
A_SECOND = 8
"""How often a terminal is drawn."""
NOTEBOOK_SECONDS = 0.25
"""Between two drawings of a notebook's bar; each is a message to the browser."""
BAR = 12
"""Characters of a terminal's bar."""


class Progress:
    """Remembers how far a fit is; what shows it is made of this. Threads may share it.

    A report of chunks takes a lock, adds a number and looks at the clock.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._lock, self._clock = threading.Lock(), clock
        self._began = self._pass_began = clock()
        self._stage, self._chunks, self._done = "starting", 0, 0
        self._record: IterationRecord | None = None
        self._stopped = False
        self._next = math.inf  # when `_draw` is called next

    def stage(self, name: str, chunks: int) -> None:
        """Begin a pass; its line is its name, unless it is an iteration, which has one at its end."""
        with self._lock:
            self._stage, self._chunks, self._done, self._pass_began = name, chunks, 0, self._clock()
        if not name.startswith("iteration "):
            self._line(logging.INFO, f"{name}: {_counted(chunks)}")
        self._draw_in_time()

    def chunks_done(self, count: int) -> None:
        """Count chunks."""
        with self._lock:
            self._done += count
        self._draw_in_time()

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Remember an iteration, and say its line."""
        before, self._record = self._record, record
        follows = before is not None and record.iteration == before.iteration + 1
        change = record.lower_bound - before.lower_bound if before and follows else None
        total = record.chunks_processed + record.chunks_skipped
        self._line(
            logging.INFO if record.full_pass and record.accepted else logging.DEBUG,
            f"iteration {record.iteration}: bound {record.lower_bound:.9g}, "
            f"change {_number(change, '+.2e')}, gap {_number(record.gap, '.1e')}, "
            f"active {_active(record)}, chunks {record.chunks_processed:,}/{total:,}, "
            f"{record.seconds:.3g} s, {_rate(record)}{'' if record.accepted else ', refused'}",
        )
        self._draw_in_time()

    def note(self, message: str) -> None:
        """Say a remark."""
        self._line(logging.INFO, message)

    def close(self, *, done: bool) -> None:
        """Remember whether the fit failed or was stopped."""
        self._stopped = not done

    def _line(self, level: int, text: str) -> None:
        """Say what happened; ``level`` is that of `logging`."""

    def _draw(self) -> None:
        """Show how far the pass is."""

    def _draw_in_time(self) -> None:
        if self._clock() >= self._next:
            self._draw()

    def _of_pass(self) -> tuple[float, list[str]]:
        """Return the share of the pass that is done, and its name, share and estimated time left as texts."""
        with self._lock:
            share = min(self._done / self._chunks, 1.0) if self._chunks else 0.0
            said = [f"stopped in {self._stage}" if self._stopped else self._stage]
            said.append(f"{share:.0%} of {_counted(self._chunks)}")
            if 0.0 < share < 1.0 and not self._stopped:
                left = (self._clock() - self._pass_began) * (1.0 - share) / share
                said.append(f"{_clock_time(left)} left")
        return share, said

    def _figures(self) -> tuple[float, list[str]]:
        """Return the share of the pass, and what a live display says beside it, the most telling first."""
        share, said = self._of_pass()
        if (record := self._record) is not None:
            said += [f"bound {record.lower_bound:.7g}", f"gap {_number(record.gap, '.1e')}"]
            said += [f"active {_active(record)}", _rate(record)]
        return share, [*said, _clock_time(self._clock() - self._began)]


class Lines(Progress):
    """One plain line for each iteration, for each other stage, for each remark, and within long passes.

    Parameters
    ----------
    write : callable (int, str) -> None
        Given the level of a line, as `logging` has them, and the line. Passes over all rows, stages and
        remarks are of level INFO; other iterations, refused steps and lines within a pass of level DEBUG.
    """

    def __init__(self, write: Callable[[int, str], None], clock: Clock = time.perf_counter) -> None:
        super().__init__(clock)
        self._write = write
        self._next = clock() + LONG_PASS

    def _line(self, level: int, text: str) -> None:
        self._next = self._clock() + LONG_PASS
        self._write(level, text)

    def _draw(self) -> None:
        name, *others = self._of_pass()[1]
        self._line(logging.DEBUG, f"{name}: {', '.join(others)}")


def to_stream(out: TextIO) -> Callable[[int, str], None]:
    """Return what writes lines to a stream, which is flushed after each and not closed.

    An error in writing, such as that of a full disk, does not end the fit, but a pipe that its reader has
    closed does.
    """
    writing = threading.Lock()

    def write(level: int, line: str) -> None:
        with writing:
            try:
                out.write(f"{one_line(line)}\n")
                out.flush()
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise

    return write


def to_log(level: int, line: str) -> None:
    """Log a line under ``emtau_dask.fit``."""
    LOG.log(level, "%s", one_line(line))


class Observers:
    """Tells each of several observers, in order."""

    def __init__(self, *observers: FitObserver) -> None:
        self._observers = observers

    def stage(self, name: str, chunks: int) -> None:
        """Tell of a pass."""
        for observer in self._observers:
            observer.stage(name, chunks)

    def chunks_done(self, count: int) -> None:
        """Tell of chunks."""
        for observer in self._observers:
            observer.chunks_done(count)

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Tell of an iteration."""
        for observer in self._observers:
            observer.iteration(record, parameters)

    def note(self, message: str) -> None:
        """Tell of a remark."""
        for observer in self._observers:
            observer.note(message)

    def close(self, *, done: bool) -> None:
        """Tell of the end."""
        for observer in self._observers:
            observer.close(done=done)


def _counted(chunks: int) -> str:
    return f"{chunks:,} chunk{'' if chunks == 1 else 's'}"


def _number(value: float | None, form: str) -> str:
    """Return a number in a form, "-" for none."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def _active(record: IterationRecord) -> str:
    """Return the share of the rows that an iteration scored."""
    return f"{min(1.0, record.active_rows / record.rows):.1%}" if record.rows else "0.0%"


def _rate(record: IterationRecord) -> str:
    """Return how many rows an iteration scored a second."""
    a_second = record.active_rows / record.seconds if record.seconds else 0.0
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if a_second >= size:
            return f"{a_second / size:.3g}{unit} rows/s"
    return f"{a_second:.3g} rows/s"


def _clock_time(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


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
