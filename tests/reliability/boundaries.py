"""The steps by which a process changes the disk, each a place where something can be made to happen."""

import os
import pathlib
import random
import signal
import sys
import threading
import time
from dataclasses import dataclass

STEPS = ("fsync", "link", "rename", "replace", "unlink", "mkdir", "rmdir")
GROWING = ("open", "write", "link", "mkdir")
"""Steps that a full disk refuses; one that is read-only refuses all."""
READS = ("os.open", "scandir")
"""By which objects are read and listed: no change of the disk, counted where one of them is to fail."""
_rename = os.rename


@dataclass(frozen=True)
class At:
    """What happens at which step.

    Attributes
    ----------
    step : int
        From 1; the steps before it are done, it and later ones are not.
    signal : int or None
        Sent to the process itself.
    error : int or None
        The ``errno`` with which steps of ``refused`` fail.
    refused : tuple of str
    times : int
        How many steps, from this one on, may fail; by default all.
    vanish : str or None
        A folder that is renamed, by ``.gone`` at its end.
    """

    step: int
    signal: int | None = None
    error: int | None = None
    refused: tuple[str, ...] = ("open", "write", *STEPS)
    times: int = sys.maxsize
    vanish: str | None = None


@dataclass(frozen=True)
class Delays:
    """Sleeps before some steps, so that processes meet in many orders."""

    seed: int
    share: float = 0.1
    seconds: float = 0.02


class Boundaries:
    """Counts steps, under a lock: whichever thread reaches the chosen one, no other starts a step then."""

    def __init__(self, at=None, delays=None):
        self.at, self.delays = at, delays
        self.count = 0
        self._lock = threading.Lock()
        self._random = random.Random(None if delays is None else delays.seed)

    def step(self, name):
        """Take note that step ``name`` comes next."""
        with self._lock:
            self.count += 1
            at = self.at
            if at is not None and self.count == at.step:
                if at.vanish is not None:
                    _rename(at.vanish, f"{at.vanish}.gone")
                if at.signal is not None:
                    os.kill(os.getpid(), at.signal)
                if at.signal == signal.SIGKILL:
                    signal.pause()
            fails = at is not None and at.step <= self.count < at.step + at.times and name in at.refused
            if fails and at.error is not None:
                raise OSError(at.error, os.strerror(at.error))
            pause = self.delays is not None and self._random.random() < self.delays.share
            seconds = self._random.random() * self.delays.seconds if pause else 0.0
        if seconds:
            time.sleep(seconds)

    def install(self):
        """Watch this process from now on; what is written goes to the disk in two halves.

        Nothing is really flushed to the device: a kill does not lose what the
        kernel has.
        """
        if self.at is not None and set(self.at.refused) <= set(READS):
            os.open, os.scandir = self._watched("os.open", os.open), self._watched("scandir", os.scandir)
            return self
        for name in STEPS:
            setattr(os, name, self._watched(name, getattr(os, name)))
        plain_open = pathlib.Path.open

        def watched_open(path, mode="r", *args, **kwargs):
            if mode not in ("xb", "wb"):
                return plain_open(path, mode, *args, **kwargs)
            self.step("open")
            return _Halves(plain_open(path, mode, *args, **kwargs), self)

        pathlib.Path.open = watched_open
        return self

    def _watched(self, name, function):
        def watched(*args, **kwargs):
            self.step(name)
            return None if name == "fsync" else function(*args, **kwargs)

        return watched


class _Halves:
    """A new file that is written in two steps."""

    def __init__(self, file, boundaries):
        self._file, self._boundaries = file, boundaries

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data):
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            self._boundaries.step("write")
            self._file.write(part)
        return len(data)

    def fileno(self):
        return self._file.fileno()

    def close(self):
        self._file.close()
