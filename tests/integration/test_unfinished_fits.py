"""A fit that fails or is interrupted leaves the estimator as it was, and an interrupt says how to go on."""

import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from sklearn.exceptions import NotFittedError

from emtau_dask import CheckpointError, EMTau, GaussianMixture, InvalidDataError
from emtau_dask.policies.policy import NextPass, Schedule

ROWS = np.random.default_rng(0).normal(size=(200, 2)) + np.repeat([[0.0], [6.0]], 100, axis=0)
NAMES = ["height", "weight"]


@dataclass(frozen=True)
class Stopping:
    """Full EM that ends at an iteration as Ctrl-C or an error of the policy's would."""

    at: int
    interrupted: bool

    def row_arrays(self, n_components, max_iter):
        return None

    def update(self, state, evidence):
        return {}, np.ones(len(evidence.labels), dtype=bool)

    def schedule(self, summary):
        if summary.iteration == self.at:
            if not self.interrupted:
                raise ZeroDivisionError
            signal.raise_signal(signal.SIGINT)
        return Schedule(NextPass.ALL, test_tol=True)


class Interrupting:
    """Rows whose reading is interrupted."""

    shape, dtype, ndim = (200, 2), np.dtype(float), 2

    def __array__(self, dtype=None, copy=None):
        signal.raise_signal(signal.SIGINT)
        return ROWS


BAD = np.full((50, 3), np.nan)
FAILURES = {
    "rows": (lambda mixture: mixture.fit(BAD), InvalidDataError),
    "features": (lambda mixture: mixture.fit(ROWS[:, :0]), InvalidDataError),
    "policy": (lambda mixture: with_policy(mixture, 2, False).fit(ROWS[:, :1]), ZeroDivisionError),
    "interrupt": (lambda mixture: with_policy(mixture, 2, True).fit(ROWS[:, :1]), KeyboardInterrupt),
}


def with_policy(mixture, at, interrupted):
    return mixture.set_params(algorithm=Stopping(at, interrupted), tol=0.0)


def fitted_attributes(mixture):
    return {name: value for name, value in vars(mixture).items() if name.endswith("_")}


@pytest.mark.parametrize("name", FAILURES)
def test_an_estimator_whose_first_fit_failed_is_not_fitted(name):
    fails, error = FAILURES[name]
    mixture = GaussianMixture(2, random_state=0)
    with pytest.raises(error):
        fails(mixture)
    assert fitted_attributes(mixture) == {}
    with pytest.raises(NotFittedError):
        mixture.predict(ROWS)


@pytest.mark.parametrize("name", FAILURES)
def test_an_estimator_whose_later_fit_failed_is_that_of_the_earlier_one(name):
    fails, error = FAILURES[name]
    mixture = GaussianMixture(2, random_state=0).fit(pd.DataFrame(ROWS, columns=NAMES))
    before, labels = fitted_attributes(mixture), mixture.predict(pd.DataFrame(ROWS, columns=NAMES))
    with pytest.raises(error):
        fails(mixture)
    after = fitted_attributes(mixture)
    assert list(before) == list(after)
    assert all(before[key] is after[key] for key in before)
    assert np.array_equal(mixture.predict(pd.DataFrame(ROWS, columns=NAMES)), labels)


def said(mixture, X):
    """What Python shows of a fit that is interrupted: not where in dask, or in which of its threads."""
    with pytest.raises(KeyboardInterrupt) as interrupt:
        mixture.fit(X)
    shown = "".join(traceback.format_exception(interrupt.value))
    assert shown.count("Traceback") == 1
    assert "dask/local.py" not in shown
    assert len(shown.splitlines()) < 30
    return "".join(traceback.format_exception_only(interrupt.value))


def test_an_interrupt_says_that_nothing_was_kept_and_how_it_would_be():
    message = said(with_policy(GaussianMixture(2, random_state=0), 3, True), ROWS)
    assert "nothing of the fit was kept" in message
    assert "checkpoint=" in message


def test_an_interrupt_says_how_to_resume(tmp_path):
    path = str(tmp_path / "run.zarr")
    mixture = with_policy(GaussianMixture(2, random_state=0, checkpoint=path), 3, True)
    assert f"GaussianMixture.resume({path!r}, X)" in said(mixture, ROWS)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        GaussianMixture.resume(path, ROWS, algorithm=Stopping(at=3, interrupted=True))
    assert f"GaussianMixture.resume({path!r}, X)" in "".join(interrupt.value.__notes__)


def test_an_interrupt_before_the_first_commit_says_that_there_is_nothing_to_resume(tmp_path):
    path = tmp_path / "run.zarr"
    mixture = GaussianMixture(2, algorithm=EMTau(), random_state=0, checkpoint=path)
    assert "nothing to resume" in said(mixture, Interrupting())
    with pytest.raises(CheckpointError):
        GaussianMixture.resume(path, ROWS)


ENDS = """
import sys, threading, time
import dask.array as da, numpy as np
from emtau_dask import FullEM, GaussianMixture

how, where, checkpoint = sys.argv[1:]
data = where or da.from_array(np.load("rows.npy"), chunks=(10, 2))
begun, schedule = threading.Event(), FullEM.schedule


def told(policy, summary):
    begun.set()
    time.sleep(0.05)
    return schedule(policy, summary)


def fit():
    try:
        settings = {"algorithm": "em", "tol": 0, "max_iter": 40, "random_state": 0}
        GaussianMixture(4, checkpoint=checkpoint or None, **settings).fit(data)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    else:
        print("fitted", flush=True)


FullEM.schedule = told
if how == "while a thread fits":
    threading.Thread(target=fit).start()
    begun.wait()
else:
    import atexit

    atexit.register(fit)
"""


@pytest.mark.kills
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("checkpoint", ["", "run.zarr"])
@pytest.mark.parametrize("where", ["", "rows.zarr"])
@pytest.mark.parametrize("how", ["while a thread fits", "before a fit begins"])
def test_an_interpreter_that_ends_is_not_blamed_on_data_or_checkpoint(how, where, checkpoint, tmp_path):
    rows = np.random.default_rng(0).normal(size=(400, 2))
    np.save(tmp_path / "rows.npy", rows)
    zarr.create_array(store=tmp_path / "rows.zarr", data=rows, chunks=(10, 2))
    command = [sys.executable, "-W", "ignore", "-c", ENDS, how, where, checkpoint]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (said,) = done.stdout.splitlines()
    if said != "fitted":
        assert said.startswith("ShutdownError: Python is shutting down, and starts no more work")
        assert "thread.join()" in said
    if checkpoint and how == "while a thread fits":
        X = tmp_path / where if where else da.from_array(rows, chunks=(10, 2))
        assert GaussianMixture.resume(tmp_path / "run.zarr", X, max_iter=50).n_iter_ > 0
