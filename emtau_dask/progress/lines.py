"""Progress as plain lines, for logs and pipes."""

from __future__ import annotations

import errno
import threading
import time
from typing import TextIO

from emtau_dask.em import IterationRecord
from emtau_dask.messages import one_line
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.progress.tracking import Clock, Tracker, active, clock_time, number, rate

LONG_PASS = 30.0
"""Seconds between two lines of one pass."""


class LineObserver:
    """One plain line for each iteration, for each stage outside the iterations, and within long passes.

    The stream is flushed after each line and not closed. An error in writing, such as that of a
    full disk, does not end the fit, but a pipe that its reader has closed does.
    """

    def __init__(self, out: TextIO, clock: Clock = time.perf_counter) -> None:
        self._out = out
        self._clock = clock
        self._tracker = Tracker(clock)
        self._writing = threading.Lock()
        self._next = clock() + LONG_PASS

    def stage(self, name: str, chunks: int) -> None:
        """Write the name of a pass, unless it is an iteration, which has its own line."""
        self._tracker.stage(name, chunks)
        self._next = self._clock() + LONG_PASS
        if not name.startswith("iteration "):
            self._write(f"{name}: {chunks:,} {'chunk' if chunks == 1 else 'chunks'}")

    def chunks_done(self, count: int) -> None:
        """Count chunks; write a line if the last one was half a minute ago."""
        self._tracker.chunks_done(count)
        now = self._clock()
        if now < self._next:
            return
        self._next = now + LONG_PASS
        view = self._tracker.view()
        left = "" if view.left is None else f", {clock_time(view.left)} left"
        self._write(f"{view.stage}: {view.share:.0%} of {view.chunks:,} chunks{left}")

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Write the line of one iteration."""
        self._tracker.iteration(record)
        total = record.chunks_processed + record.chunks_skipped
        self._write(
            f"iteration {record.iteration}: bound {record.lower_bound:.9g}, "
            f"change {number(self._tracker.view().change, '+.2e')}, gap {number(record.gap, '.1e')}, "
            f"active {active(record)}, chunks {record.chunks_processed:,}/{total:,}, "
            f"{record.seconds:.3g} s, {rate(record)}{'' if record.accepted else ', refused'}"
        )

    def note(self, message: str) -> None:
        """Write a remark."""
        self._write(message)

    def close(self, *, done: bool) -> None:
        """Leave the stream as it is."""

    def _write(self, line: str) -> None:
        with self._writing:
            try:
                self._out.write(f"{one_line(line)}\n")
                self._out.flush()
            except OSError as error:
                if error.errno == errno.EPIPE:
                    raise
