"""Command lines of `emtau fit` that a signal ends at a stage of the fit, and what is left of them."""

import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from emtau_dask import GaussianMixture
from emtau_dask.cli.main import main

EMTAU = [sys.executable, "-X", "faulthandler", "-c", "from emtau_dask.cli.main import main; main()"]
INTERRUPTED, NOT_CONVERGED = 130, 3
PATIENCE = 30.0
"""Seconds within which a process has to end after the signal."""
SETTINGS = {"model.random_state": 3, "stop.tol": 0, "stop.max_iter": 30, "checkpoint.path": "out/run.zarr"}
FIT = (
    "fit", "rows.zarr", "-v", "-k", "3", "-o", "out",
    *(f"--set={key}={value}" for key, value in SETTINGS.items()),
)  # fmt: skip
WAYS = {
    "two threads": ("--algorithm", "em-tau", "--workers", "2"),
    "one thread": ("--algorithm", "em-tau", "--workers", "1"),
    "auto": ("--algorithm", "auto", "--workers", "2"),
    "cluster": ("--algorithm", "em-tau", "--workers", "2", "--scheduler", "processes"),
}
STAGES = {
    "start-up": ("", 3.0),
    "fingerprint": ("fingerprint", 0.1),
    "sample": ("sample: ", 0.1),
    "k-means": ("k-means 1", 0.1),
    "first iterations": ("k-means 1", 0.5),
    "an iteration": ("iteration 4:", 0.3),
    "the end": ("iteration 29:", 0.3),
    "results": ("labels:", 0.1),
}
"""After which word of what it says, and at most how many seconds later, a signal is sent."""
SAID = re.compile(
    r"emtau: interrupted("
    r"| before the first commit; there is nothing to resume"
    r"|; the last commit is intact\. Resume with: emtau resume out/run\.zarr"
    r"|; it did not end by itself and was killed\. .* Resume with: emtau resume out/run\.zarr)"
)


def make_rows(folder):
    """Write the data of all fits."""
    options = "--rows 60000 --features 4 --components 3 --chunk-rows 8000"
    command = [*EMTAU, "dataset", "mixture", "rows.zarr", *options.split()]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


def _forked(arguments, folder):
    """Run the command line in a fork of this process, which has imported it; return its exit code."""
    pid = os.fork()
    if pid == 0:
        os.chdir(folder)
        for number in (1, 2):
            os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        faulthandler.enable()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            main(list(arguments))
        except SystemExit as end:
            os._exit(end.code or 0)
    Path(folder, "started").write_text(str(pid))
    Path(folder, "started").rename(Path(folder, "pid"))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class CommandLine:
    """A command line that runs in a folder: forked from a zygote or, without one, begun as a user's."""

    def __init__(self, arguments, folder, zygote):
        self._log = folder / "log"
        self._log.write_bytes(b"")
        if zygote is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen([*EMTAU, *arguments], cwd=folder, stdout=log, stderr=log)
            self._pid, self._child = self._process.pid, None
        else:
            (folder / "pid").unlink(missing_ok=True)
            self._child = zygote.start(_forked, arguments, folder)
            while not (folder / "pid").exists():
                time.sleep(0.001)
            self._pid = int((folder / "pid").read_text())

    @property
    def said(self):
        """What it has written so far."""
        return self._log.read_text()

    @property
    def ended(self):
        """Whether it has ended."""
        return self._process.poll() is not None if self._child is None else self._child.ended

    def signal(self, number):
        """Send it a signal, unless it has ended."""
        if not self.ended:
            os.kill(self._pid, number)

    def code(self, patience):
        """Wait for its end, and return its exit code; of one that does not end, raise `TimeoutError`."""
        limit = time.monotonic() + patience
        while not self.ended:
            if time.monotonic() > limit:
                self.signal(signal.SIGABRT)  # It writes where all its threads are.
                time.sleep(1)
                self.signal(signal.SIGKILL)
                raise TimeoutError(f"alive after {patience} s:\n{self.said}")
            time.sleep(0.002)
        return self._process.wait() if self._child is None else self._child.result()


@dataclass(frozen=True)
class Termination:
    """What came of a command line that got a signal.

    Attributes
    ----------
    code : int
        Its exit code.
    seconds : float
        From the signal to its end.
    said : str
        The last line.
    resumed : bool
        Whether there was something to resume.
    """

    code: int
    seconds: float
    said: str
    resumed: bool


def terminated(way, stage, number, delay, folder, zygote=None):
    """Begin a fit in a folder with ``rows.zarr``, send it a signal, and resume what is left.

    A command line that begins as a user's heeds no signal while Python starts, and none when all is done.

    Raises
    ------
    TimeoutError, AssertionError
        It did not end in time, or its exit code, or what it said, is wrong.
    """
    line = CommandLine((*FIT, *WAYS[way]), folder, zygote)
    while STAGES[stage][0] not in line.said and not line.ended:
        time.sleep(0.001)
    time.sleep(delay)
    begun = time.monotonic()
    line.signal(number)
    code = line.code(PATIENCE)
    seconds, said = time.monotonic() - begun, line.said
    last = said.splitlines()[-1] if said else ""
    unheeded = zygote is None and (stage == "start-up" or "the results are written" in last)
    assert code in {INTERRUPTED, NOT_CONVERGED, *((-number, 1) if unheeded else ())}, (code, said)
    if code == INTERRUPTED:
        assert SAID.fullmatch(last), said
        assert "Traceback" not in said, said
    resumed = code != NOT_CONVERGED and any((folder / "out/run.zarr/commits").glob("[0-9]*/zarr.json"))
    if resumed:
        line = CommandLine(("resume", "out/run.zarr"), folder, zygote)
        assert line.code(20 * PATIENCE) == NOT_CONVERGED, line.said
    return Termination(code, seconds, last, resumed)


def undisturbed(way, folder, zygote=None):
    """Run a fit to its end, and return its bits."""
    line = CommandLine((*FIT, *WAYS[way]), folder, zygote)
    assert line.code(20 * PATIENCE) == NOT_CONVERGED, line.said
    return bits(folder)


def bits(folder):
    """The bits of the fit whose results are in a folder."""
    model = GaussianMixture.load(folder / "out/model.zarr")
    arrays = model.weights_, model.means_, model.covariances_, np.array(model.lower_bounds_)
    return [array.tobytes() for array in arrays]
