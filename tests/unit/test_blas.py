"""Holding BLAS to one thread: nested and concurrent holders share one limit and restore what was there.

In a process of its own, since tasks of other tests may hold the limit for the rest of theirs.
"""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, threading
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits
from emtau_dask import GaussianMixture, InvalidDataError
from emtau_dask.engine.blas import hold_single_thread, single_threaded_blas

def limits(api="blas"):
    return sorted({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == api})

def elsewhere(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]

def held():
    with single_threaded_blas():
        return limits()

seen = {}
with threadpool_limits(2):
    with single_threaded_blas():
        seen["held inside a limit of the user's"] = limits()
with single_threaded_blas():
    seen["held"] = limits()
    seen["held, in another thread"] = elsewhere(limits)
    with single_threaded_blas():
        seen["nested"] = limits()
    seen["inner left"] = limits()
seen["both left"] = limits()

seen["held by another thread after this one"] = elsewhere(held)
seen["left by another thread"] = limits()

entered, leave = threading.Event(), threading.Event()
def hold():
    with single_threaded_blas():
        entered.set()
        leave.wait()
other = threading.Thread(target=hold)
with single_threaded_blas():
    other.start()
    entered.wait()
seen["first of two threads left"] = limits()
leave.set()
other.join()
seen["both threads left"] = limits()

broken = []
def hammer():
    for _ in range(30):
        if held() != [1]:
            broken.append(limits())
threads = [threading.Thread(target=hammer) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
seen["broken by hammering"] = broken
seen["hammered"] = limits()

try:
    with single_threaded_blas():
        raise RuntimeError
except RuntimeError:
    seen["after an error"] = limits()

X = np.random.default_rng(0).normal(size=(60, 2))
GaussianMixture(2).fit(X)
seen["after a fit"] = limits()
seen["after a fit, OpenMP"] = limits("openmp")
X[40] = np.nan
try:
    GaussianMixture(2).fit(X)
except InvalidDataError:
    seen["after a fit that failed"] = limits()

with single_threaded_blas():
    hold_single_thread()
seen["task inside a holder"] = limits()
elsewhere(hold_single_thread)
seen["task in a worker"] = limits()
elsewhere(hold_single_thread)
with single_threaded_blas():
    pass
seen["worker goes on"] = limits()
print(json.dumps(seen))
"""

EXPECTED = {
    "held inside a limit of the user's": [1],
    "held": [1],
    "held, in another thread": [1],
    "nested": [1],
    "inner left": [1],
    "both left": [2],
    "held by another thread after this one": [1],
    "left by another thread": [2],
    "first of two threads left": [1],
    "both threads left": [2],
    "broken by hammering": [],
    "hammered": [2],
    "after an error": [2],
    "after a fit": [2],
    "after a fit, OpenMP": [2],
    "after a fit that failed": [2],
    "task inside a holder": [2],
    "task in a worker": [1],
    "worker goes on": [1],
}


@pytest.fixture(scope="module")
def seen():
    two = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env={**os.environ, **two}
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("moment", EXPECTED)
def test_thread_limits(seen, moment):
    assert seen[moment] == EXPECTED[moment]
