"""What displays remember of a fit, and how they say it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from emtau_dask.em import IterationRecord

Clock = Callable[[], float]


@dataclass(frozen=True)
class View:
    """How far a fit is.

    Attributes
    ----------
    stage : str
        The pass that runs, or ran last; "" before the first.
    chunks, done : int
        Of that pass.
    record : IterationRecord or None
        The last iteration.
    change : float or None
        Of its bound since the iteration before, nats per row.
    seconds, of_pass : float
        Since the beginning of the fit, and of the pass.
    stopped : bool
        Whether the fit failed or was stopped.
    """

    stage: str = ""
    chunks: int = 0
    done: int = 0
    record: IterationRecord | None = None
    change: float | None = None
    seconds: float = 0.0
    of_pass: float = 0.0
    stopped: bool = False

    @property
    def share(self) -> float:
        """The part of the pass that is done."""
        return min(self.done / self.chunks, 1.0) if self.chunks else 0.0

    @property
    def left(self) -> float | None:
        """Estimated seconds until the pass ends; None before a chunk is done."""
        return self.of_pass * (1.0 - self.share) / self.share if self.share else None


class Tracker:
    """Remembers what an observer is told of; threads may share it.

    A report of chunks takes a lock and adds a number: nothing is drawn or written for it.
    """

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self._began = self._pass_began = clock()
        self._view = View()
        self._done = 0

    def stage(self, name: str, chunks: int) -> None:
        """Begin a pass."""
        with self._lock:
            self._pass_began, self._done = self._clock(), 0
            self._view = replace(self._view, stage=name, chunks=chunks)

    def chunks_done(self, count: int) -> None:
        """Count chunks."""
        with self._lock:
            self._done += count

    def iteration(self, record: IterationRecord) -> None:
        """Remember an iteration."""
        with self._lock:
            before = self._view.record
            follows = before is not None and record.iteration == before.iteration + 1
            change = record.lower_bound - before.lower_bound if before and follows else None
            self._view = replace(self._view, record=record, change=change)

    def stop(self) -> None:
        """Remember that the fit failed or was stopped."""
        with self._lock:
            self._view = replace(self._view, stopped=True)

    def view(self) -> View:
        """Return how far the fit is now."""
        with self._lock:
            now = self._clock()
            return replace(
                self._view, done=self._done, seconds=now - self._began, of_pass=now - self._pass_began
            )


def number(value: float | None, form: str) -> str:
    """Return a number in a form, "-" for none."""
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def active(record: IterationRecord) -> str:
    """Return the share of the rows that an iteration scored."""
    return f"{min(1.0, record.active_rows / record.rows):.1%}" if record.rows else "0.0%"


def rate(record: IterationRecord) -> str:
    """Return how many rows an iteration scored a second."""
    a_second = record.active_rows / record.seconds if record.seconds else 0.0
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if a_second >= size:
            return f"{a_second / size:.3g}{unit} rows/s"
    return f"{a_second:.3g} rows/s"


def clock_time(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def figures(view: View) -> list[str]:
    """Return what a live display says beside the bar of the pass, the most telling first."""
    stage = view.stage or "starting"
    chunks = f"{view.chunks:,} chunk{'' if view.chunks == 1 else 's'}"
    said = [f"stopped in {stage}" if view.stopped else stage, f"{view.share:.0%} of {chunks}"]
    if view.left is not None and view.share < 1.0 and not view.stopped:
        said.append(f"{clock_time(view.left)} left")
    if (record := view.record) is not None:
        said += [
            f"bound {record.lower_bound:.7g}",
            f"gap {number(record.gap, '.1e')}",
            f"active {active(record)}",
            rate(record),
        ]
    return [*said, clock_time(view.seconds)]
