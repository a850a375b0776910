"""What a person sees while a fit runs: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from emtau_dask.messages import shown

if TYPE_CHECKING:
    from rich.console import RenderableType

    from emtau_dask.em import FitObserver, IterationRecord
    from emtau_dask.mixture.model import MixtureParameters


def observer_for(verbose: int, out: TextIO | None = None) -> FitObserver:
    """Return the observer that suits a stream.

    Parameters
    ----------
    verbose : int
        0 shows nothing.
    out : text stream or None
        Where to write; by default standard output.

    Returns
    -------
    FitObserver
        A live display on a terminal, plain lines elsewhere.
    """
    if not verbose:
        from emtau_dask.em import SilentObserver

        return SilentObserver()
    stream = out or sys.stdout
    return RichObserver(stream) if stream.isatty() else LineObserver(stream)


@contextmanager
def watching(out: TextIO) -> Iterator[FitObserver]:
    """Show progress on `out` inside the block, through the observer that the block gets."""
    observer = observer_for(1, out)
    try:
        yield observer
    finally:
        observer.close()


class _Tracker:
    """What both displays need to remember of a fit; safe to use from several threads."""

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
            continues = self.record is not None and record.iteration == self.record.iteration + 1
            self.change = record.lower_bound - self.record.lower_bound if continues and self.record else None
            self.record = record

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.started


class LineObserver:
    """One plain line for each iteration, and for each stage outside the iterations.

    A stream that cannot be written, such as a log on a full disk, ends no fit; a reader
    that has gone does.

    Parameters
    ----------
    out : text stream
        Where the lines go; flushed after each.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tracker = _Tracker()

    def stage(self, name: str, chunks: int) -> None:
        """Announce a pass, unless its iteration will report it."""
        if not _is_iteration(name):
            self._write(f"{name}: {chunks:,} {'chunk' if chunks == 1 else 'chunks'}")

    def chunks_done(self, count: int) -> None:
        """Say nothing: a line for each chunk would bury the others."""

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Write the line of one iteration."""
        self._tracker.iteration(record)
        total = record.chunks_processed + record.chunks_skipped
        self._write(
            f"iteration {record.iteration}: bound {record.lower_bound:.9g}, "
            f"change {_change(self._tracker.change)}, active {_active(record)}, "
            f"chunks {record.chunks_processed:,}/{total:,}, {record.seconds:.3g} s"
        )

    def note(self, message: str) -> None:
        """Write a remark."""
        self._write(message)

    def close(self) -> None:
        """Leave the stream open: it is the caller's."""

    def _write(self, line: str) -> None:
        with self._tracker.lock:
            try:
                self._out.write(f"{shown(line)}\n")
                self._out.flush()
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise


class RichObserver:
    """A live display: iteration, bound, change, active rows, chunks, elapsed time.

    Parameters
    ----------
    out : text stream
        A terminal.

    Notes
    -----
    The display is drawn a few times a second from what was last reported, so
    that reporting costs next to nothing. It disappears on `close`.
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
            _clock(tracker.elapsed),
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


def _is_iteration(stage: str) -> bool:
    return stage.startswith("iteration ")


def _change(change: float | None) -> str:
    return "-" if change is None else f"{change:+.2e}"


def _active(record: IterationRecord) -> str:
    return f"{record.active_rows / record.rows:.1%}" if record.rows else "0.0%"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
