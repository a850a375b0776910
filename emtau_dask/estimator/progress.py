"""What a person sees while a fit runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from emtau_dask.em import FitObserver, IterationRecord, SilentObserver
from emtau_dask.messages import shown
from emtau_dask.mixture.model import MixtureParameters

if TYPE_CHECKING:
    from rich.console import RenderableType


def observer_for(verbose: int, out: TextIO | None = None) -> FitObserver:
    """Return the observer that suits a stream, by default standard output; it is silent if verbose is 0."""
    if not verbose:
        return SilentObserver()
    stream = out or sys.stdout
    return RichObserver(stream) if stream.isatty() else LineObserver(stream)


@contextmanager
def watching(out: TextIO) -> Iterator[FitObserver]:
    """Give the block an observer that shows progress on ``out`` until the block ends."""
    observer = observer_for(1, out)
    try:
        yield observer
    finally:
        observer.close()


class _Tracker:
    """What both displays remember of a fit; threads may share it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.started = time.perf_counter()
        self.stage_name = ""
        self.chunks = 0
        self.done = 0
        self.record: IterationRecord | None = None
        self.change: float | None = None

    def stage(self, name: str, chunks: int) -> None:
        with self.lock:
            self.stage_name, self.chunks, self.done = name, chunks, 0

    def chunks_done(self, count: int) -> None:
        with self.lock:
            self.done += count

    def iteration(self, record: IterationRecord) -> None:
        with self.lock:
            before, self.record = self.record, record
            continues = before is not None and record.iteration == before.iteration + 1
            self.change = record.lower_bound - before.lower_bound if before and continues else None


class LineObserver(SilentObserver):
    """One plain line for each iteration, and for each stage outside the iterations.

    The stream is flushed after each line and not closed. An error in writing, such as that of a
    full disk, does not end the fit, but a pipe that its reader has closed does.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tracker = _Tracker()

    def stage(self, name: str, chunks: int) -> None:
        """Write the name of a pass, unless it is an iteration, which has its own line."""
        if not name.startswith("iteration "):
            self._write(f"{name}: {chunks:,} {'chunk' if chunks == 1 else 'chunks'}")

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Write the line of one iteration."""
        self._tracker.iteration(record)
        total = record.chunks_processed + record.chunks_skipped
        self._write(
            f"iteration {record.iteration}: bound {record.lower_bound:.9g}, "
            f"change {_change(self._tracker.change)}, active {_active(record)}, "
            f"chunks {record.chunks_processed:,}/{total:,}, {record.seconds:.3g} s"
            f"{'' if record.accepted else ', refused'}"
        )

    def note(self, message: str) -> None:
        """Write a remark."""
        self._write(message)

    def _write(self, line: str) -> None:
        with self._tracker.lock:
            try:
                self._out.write(f"{shown(line)}\n")
                self._out.flush()
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise


class RichObserver:
    """A live display on a terminal: iteration, bound, change, active rows, chunks, elapsed time.

    It is drawn a few times a second from what was last reported, so that a report costs next to
    nothing. `close` removes it.
    """

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._tracker = _Tracker()
        self._live = Live(
            console=Console(file=out),
            get_renderable=self._render,
            refresh_per_second=8,
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

    def close(self) -> None:
        """Remove the display."""
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        tracker = self._tracker
        with tracker.lock:
            name, chunks, done = tracker.stage_name, tracker.chunks, tracker.done
            record, change = tracker.record, tracker.change
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            Text(name or "starting", style="bold"),
            ProgressBar(total=max(chunks, 1), completed=min(done, chunks), width=30),
            f"{done:,}/{chunks:,} chunks",
            _clock(time.perf_counter() - tracker.started),
        )
        if record is None:
            return bar
        figures = Table.grid(padding=(0, 2))
        figures.add_row(
            f"iteration [bold]{record.iteration:,}[/]",
            f"bound [bold]{record.lower_bound:.7g}[/]",
            f"change [bold]{_change(change)}[/]",
            f"active [bold]{_active(record)}[/]",
        )
        return Group(figures, bar)


def _change(change: float | None) -> str:
    return "-" if change is None else f"{change:+.2e}"


def _active(record: IterationRecord) -> str:
    return f"{record.active_rows / record.rows:.1%}" if record.rows else "0.0%"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
