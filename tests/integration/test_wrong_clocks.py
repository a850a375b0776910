"""Fits whose wall clock jumps by days and years, there and back, while they run."""

import faulthandler
import os
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dask
import numpy as np
import pytest
import zarr
from clusters import GUARD
from distributed import Client, LocalCluster
from fits import ROWS, assert_same_bits, mixture, quietly
from reliability.containers import compiled_clock

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting

pytestmark = pytest.mark.kills
DAY = 86_400
JUMPS = {
    "threads": {2: DAY, 3: -400 * DAY, 5: 20 * 365 * DAY, 7: -DAY, 9: 0},
    "cluster": {2: DAY, 5: 400 * DAY, 9: 20 * 365 * DAY},
}
"""Seconds that the clock differs by from the end of an iteration on.

Distributed sends messages when the wall clock says so (`distributed.batched`): one that waits while the clock
is set back is held up for as long. So a cluster's jumps ahead alone.
"""
LATER = {"threads": -30 * DAY, "cluster": 21 * 365 * DAY}
"""By how much it differs while the fit is resumed."""


def fit(rows, run):
    settings = {"algorithm": EMTau(tau=2, revisit=3), "tol": 0, "max_iter": 12, "init_params": "random"}
    return quietly(mixture(**settings, checkpoint=run), rows)


@contextmanager
def computing(way):
    """Compute in threads, or in the processes of a cluster, whose clocks jump as well."""
    with ExitStack() as stack:
        if way == "cluster":
            cluster = stack.enter_context(
                LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
            )
            stack.enter_context(Client(cluster))
        else:
            stack.enter_context(dask.config.set(scheduler="threads", num_workers=2))
        yield


def set_clock(file, seconds):
    """Replace the file at once: a process that read it while it is empty would set its clock back."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds}\n")
    new.replace(file)


def jumping(folder, way):
    """Fit, resume and save in a process whose clock jumps; where it hangs, say where."""
    faulthandler.dump_traceback_later(0.8 * GUARD)
    clock, met = folder / "clock", []

    class Observer(SilentObserver):
        def iteration(self, record, parameters):
            if record.iteration in JUMPS[way]:
                set_clock(clock, JUMPS[way][record.iteration])
            met.append(time.time())

    fitting.observer_for = lambda verbose: Observer()
    rows = zarr.open_array(folder / "rows.zarr", mode="r")
    with computing(way):
        model = fit(rows, folder / "run")
        assert max(np.abs(np.diff(met))) > 300 * DAY, "the clock did not jump"
        assert all(0 <= record.seconds < GUARD for record in model.history_)
        set_clock(clock, LATER[way])
        assert_same_bits(GaussianMixture.resume(folder / "run", rows), model)
    model.save(folder / "model")


@pytest.mark.parametrize("way", ["threads", "cluster"])
def test_a_clock_that_jumps_changes_no_bit(tmp_path, way):
    rows = zarr.create_array(store=tmp_path / "rows.zarr", data=ROWS, chunks=(30, 2))
    command = (
        f"import test_wrong_clocks as own, pathlib; own.jumping(pathlib.Path({str(tmp_path)!r}), {way!r})"
    )
    environment = os.environ | {
        "LD_PRELOAD": str(compiled_clock(tmp_path)),
        "WRONG_CLOCK": str(tmp_path / "clock"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])]),
    }
    subprocess.run([sys.executable, "-c", command], env=environment, check=True, timeout=GUARD)
    with dask.config.set(scheduler="threads"):
        expected = fit(rows, None)
    assert_same_bits(GaussianMixture.load(tmp_path / "model"), expected)
