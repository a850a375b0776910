"""Interrupts at many instants: they come out as such, what a fit sets for the process is set back, bits stay.

In a process of their own, whose timer interrupts it.
"""

import json
import os
import subprocess
import sys

import pytest

COMMON = """
import json, shutil, signal, sys, time, warnings
import dask, dask.array as da
import numpy as np
from threadpoolctl import threadpool_info
from emtau_dask import CheckpointError, EMTau, GaussianMixture

warnings.simplefilter("ignore")
signal.signal(signal.SIGALRM, signal.default_int_handler)
_random = np.random.default_rng(0)
X = np.concatenate([_random.normal(c, 1, (500, 4)) for c in (-2, 2)])
CHUNKED = da.from_array(X, chunks=(100, 4))

def settings():
    blas = sorted({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"})
    return [blas, sys.getswitchinterval()]

def interrupted(work, seconds):
    "Return what came of work that is interrupted after some time: nothing, or the error's name."
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        work()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return ""
    except BaseException as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        return type(error).__name__

def model(**options):
    return GaussianMixture(3, algorithm=EMTau(tau=3), random_state=0, max_iter=6, tol=0.0, **options)

def bits(fitted):
    return fitted.means_.tobytes().hex() + fitted.covariances_.tobytes().hex()

def seconds_of(work):
    began = time.perf_counter()
    work()
    return time.perf_counter() - began

def during(work, n):
    "Interrupt work n times, spread over what it takes, and look at the settings each time."
    work()
    usual, span = settings(), seconds_of(work)
    ends, changed = [], []
    for i in range(n):
        ends.append(interrupted(work, 1e-5 + span * i / n))
        limit = time.monotonic() + 10
        while settings() != usual and time.monotonic() < limit:
            time.sleep(0.001)  # a second interrupt cannot come, so this is the thread that sets them back
        if settings() != usual:
            changed.append(settings())
            break
    return sorted(set(ends)), changed
"""

FITS = """
found = {}
cases = {"array": (X, "threads"), "chunks": (CHUNKED, "threads"), "one thread": (CHUNKED, "synchronous")}
for name, (rows, scheduler) in cases.items():
    with dask.config.set(scheduler=scheduler):
        fit = lambda: model().fit(rows)
        expected = bits(fit())
        ends, changed = during(fit, 50)
        found[name] = [ends, changed, bits(fit()) == expected]
print(json.dumps(found))
"""

SCORES = """
fitted = model().fit(X)
expected = fitted.score(CHUNKED), fitted.predict(X).tobytes()
calls = {
    "score": lambda: fitted.score(CHUNKED),
    "predict": lambda: fitted.predict(X),
    # Dask's own threads need not end after an interrupt of a compute() that is the user's.
    "predict lazily": lambda: fitted.predict(CHUNKED).compute(scheduler="synchronous"),
}
found = {}
for name, call in calls.items():
    ends, changed = during(call, 25)
    found[name] = [ends, changed, (fitted.score(CHUNKED), fitted.predict(X).tobytes()) == expected]
print(json.dumps(found))
"""

CHECKPOINTS = """
folder = sys.argv[1]
fit = lambda: model(checkpoint=f"{folder}/run").fit(CHUNKED)
expected, n, ends, wrong, resumed = bits(fit()), 15, set(), [], 0
shutil.rmtree(f"{folder}/run")
span = seconds_of(fit)
for i in range(n):
    shutil.rmtree(f"{folder}/run", ignore_errors=True)
    ends.add(interrupted(fit, 1e-5 + span * i / n))
    try:
        found = bits(GaussianMixture.resume(f"{folder}/run", CHUNKED))
    except CheckpointError as error:
        assert "holds no" in str(error), error
    else:
        resumed += 1
        wrong += [i] * (found != expected)
print(json.dumps([sorted(ends), wrong, resumed]))
"""


DROPPED = """
import gc, signal, time
import click
from emtau_dask.cli.exits import ExitGroup

@click.group(cls=ExitGroup)
def main(): pass

@main.command()
def work():
    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(signal.SIGINT)
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)

main()
"""


def test_a_command_heeds_an_interrupt_that_falls_into_the_garbage_collector():
    """Where Python writes an error that it raised, and goes on."""
    run = subprocess.run(
        [sys.executable, "-c", DROPPED, "work"], capture_output=True, text=True, check=False, timeout=50
    )
    assert (run.returncode, run.stderr) == (130, "emtau: interrupted\n")


def answer(script, *arguments):
    two = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COMMON + script, *map(str, arguments)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **two}, timeout=280
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


DASKS_OWN = {"predict lazily": {"InvalidStateError"}}
"""What an interrupt may come out as where the user computes: it falls into a future of dask's scheduler."""


@pytest.mark.parametrize("script", [FITS, SCORES], ids=["fits", "scores"])
def test_nothing_of_an_interrupt_stays(script):
    for name, (ends, changed, same) in answer(script).items():
        assert "KeyboardInterrupt" in ends, name
        assert set(ends) <= {"", "KeyboardInterrupt"} | DASKS_OWN.get(name, set()), name
        assert changed == [], name
        assert same, name


def test_a_fit_interrupted_at_any_instant_is_resumed_to_the_same_bits(tmp_path):
    ends, wrong, resumed = answer(CHECKPOINTS, tmp_path)
    assert set(ends) <= {"", "KeyboardInterrupt"}
    assert wrong == []
    assert resumed
