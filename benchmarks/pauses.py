"""How long the whole machine stood still: a virtual machine is paused without being told.

Such a pause falls on whatever is being measured, so a time says more without
it. A watcher on each processor sleeps for some milliseconds again and again; a time
in which all of them overslept is one in which the machine did not run. Work of
this machine alone does not look like that where the watchers may have real-time
priority, and without it they are not used.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType

Interval = tuple[float, float]

TICK = 0.004
LEAST = 0.006
"""Seconds that a watcher must oversleep by."""


def watch(processor: int, told: Connection) -> None:
    """At any message send the intervals so far in which this process did not wake up; None ends it."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    told.send(None)
    gaps, last = [], time.monotonic()
    while True:
        time.sleep(TICK)
        now = time.monotonic()
        if now - last > TICK + LEAST:
            gaps.append((last, now))
        last = now
        if told.poll():
            if told.recv() is None:
                return
            told.send(gaps)


def common(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Return the times that are in an interval of ``a`` and in one of ``b``, both ascending and disjoint."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        began, ended = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if began < ended:
            found.append((began, ended))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


class Pauses:
    """Knows the machine's pauses since its context began.

    Attributes
    ----------
    watched : bool
        False where the watchers may not have real-time priority: then no pause is ever known.
    """

    def __init__(self) -> None:
        self.watched = can_watch()

    def __enter__(self) -> Pauses:
        context = get_context("spawn")
        self._watchers = []
        for processor in os.sched_getaffinity(0) if self.watched else ():
            mine, theirs = context.Pipe()
            process = context.Process(target=watch, args=(processor, theirs), daemon=True)
            process.start()
            theirs.close()
            self._watchers.append((process, mine))
        for _, told in self._watchers:
            told.recv()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, told in self._watchers:
            told.send(None)
            process.join()

    def so_far(self) -> list[Interval]:
        """Return when each pause began and ended, in `time.monotonic`'s seconds."""
        found: list[Interval] = []
        for place, (_, told) in enumerate(self._watchers):
            told.send("so far?")
            gaps = told.recv()
            found = common(found, gaps) if place else gaps
        return found

    def seconds_without(self, interval: Interval) -> float:
        """Return how long ``interval``, which is over, was without pauses."""
        paused = sum(ended - began for began, ended in common(self.so_far(), [interval]))
        return interval[1] - interval[0] - paused


def can_watch() -> bool:
    """Return whether a process may have real-time priority here."""
    if not sys.platform.startswith("linux"):
        return False
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, *before)
    return True
