"""Holding BLAS to one thread and the switch interval short: holders share both and restore what was there.

And memory, which malloc keeps from then on.

In a process of its own, since tasks of other tests may hold the limit for the rest of theirs.
"""

import json
import math
import os
import platform
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys, threading
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits
from emtau_dask import GaussianMixture, InvalidDataError
from emtau_dask.process import hold_for_process, threads_side_by_side

def limits(api="blas"):
    return sorted({pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == api})

def elsewhere(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]

def held():
    with threads_side_by_side():
        return limits()

seen = {}
intervals = {"before": sys.getswitchinterval()}
with threadpool_limits(2):
    with threads_side_by_side():
        seen["held inside a limit of the user's"] = limits()
with threads_side_by_side():
    seen["held"] = limits()
    seen["held, in another thread"] = elsewhere(limits)
    with threads_side_by_side():
        seen["nested"] = limits()
    seen["inner left"] = limits()
    intervals["inner left"] = sys.getswitchinterval()
seen["both left"] = limits()
intervals["both left"] = sys.getswitchinterval()
with threads_side_by_side():
    sys.setswitchinterval(0.25)
intervals["set by the user inside"] = sys.getswitchinterval()
sys.setswitchinterval(1e-5)
with threads_side_by_side():
    intervals["held, where it was shorter"] = sys.getswitchinterval()
intervals["left, where it was shorter"] = sys.getswitchinterval()
sys.setswitchinterval(5e-3)

seen["held by another thread after this one"] = elsewhere(held)
seen["left by another thread"] = limits()

entered, leave = threading.Event(), threading.Event()
def hold():
    with threads_side_by_side():
        entered.set()
        leave.wait()
other = threading.Thread(target=hold)
with threads_side_by_side():
    other.start()
    entered.wait()
seen["first of two threads left"] = limits()
leave.set()
other.join()
seen["both threads left"] = limits()

broken = []
def hammer():
    for _ in range(10):
        if held() != [1]:
            broken.append(limits())
threads = [threading.Thread(target=hammer) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
seen["broken by hammering"] = broken
seen["hammered"] = limits()

lingered = []
for _ in range(100):
    with threads_side_by_side():
        with threads_side_by_side():
            pass
    if limits() != [2]:
        lingered.append(limits())
seen["outlived the outer of two nested holders"] = lingered

try:
    with threads_side_by_side():
        raise RuntimeError
except RuntimeError:
    seen["after an error"] = limits()

X = np.random.default_rng(0).normal(size=(60, 2))
GaussianMixture(2).fit(X)
seen["after a fit"] = limits()
intervals["after a fit"] = sys.getswitchinterval()
seen["after a fit, OpenMP"] = limits("openmp")
X[40] = np.nan
try:
    GaussianMixture(2).fit(X)
except InvalidDataError:
    seen["after a fit that failed"] = limits()

with threads_side_by_side():
    hold_for_process()
seen["task inside a holder"] = limits()
elsewhere(hold_for_process)
seen["task in a worker"] = limits()
intervals["task in a worker"] = sys.getswitchinterval()
elsewhere(hold_for_process)
with threads_side_by_side():
    pass
seen["worker goes on"] = limits()
print(json.dumps([seen, intervals]))
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
    "outlived the outer of two nested holders": [],
    "after an error": [2],
    "after a fit": [2],
    "after a fit, OpenMP": [2],
    "after a fit that failed": [2],
    "task inside a holder": [2],
    "task in a worker": [1],
    "worker goes on": [1],
}

INTERVALS = {
    "before": 5e-3,
    "inner left": 5e-5,
    "both left": 5e-3,
    "set by the user inside": 0.25,
    "held, where it was shorter": 1e-5,
    "left, where it was shorter": 1e-5,
    "after a fit": 5e-3,
    "task in a worker": 5e-5,
}


TWO = {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}


def said(program):
    """What a program prints as JSON, where libraries may use two threads."""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **TWO})
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_limits_and_intervals_are_held_and_restored():
    limits, intervals = said(SCRIPT)
    assert limits == EXPECTED
    assert intervals == pytest.approx(INTERVALS)


ROUNDS, PAGES = 20, 7000  # of seven arrays
FAULTS = """
import resource, sys
import numpy as np
from contextlib import nullcontext
from emtau_dask.process import threads_side_by_side

rounds, pages, kept = (int(argument) for argument in sys.argv[1:])

def pages_filled():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        arrays = [np.empty(pages // 7 * 4096, np.uint8) for _ in range(7)]
        for array in arrays:
            array.fill(1)
        del array, arrays
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with threads_side_by_side() if kept else nullcontext():
    print(pages_filled())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other mallocs keep memory by other rules")
@pytest.mark.parametrize(
    ("kept", "limits", "least", "most"),
    [
        (True, {}, 0, 2 * PAGES),
        (False, {}, ROUNDS // 2 * PAGES, math.inf),
        (True, {"MALLOC_TRIM_THRESHOLD_": "65536"}, ROUNDS // 2 * PAGES, math.inf),
    ],
    ids=["kept", "not asked for", "not where the user set a limit"],
)
def test_memory_of_arrays_is_kept_for_the_next_ones(kept, limits, least, most):
    """Else each page of each array is asked for again: minor faults, as the system counts them."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", FAULTS, str(ROUNDS), str(PAGES), str(int(kept))],
        env={**ours, **limits, "NUMPY_MADVISE_HUGEPAGE": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    assert least <= int(run.stdout) <= most


WAITING = """
import json, threading, time
from threadpoolctl import threadpool_info
from emtau_dask import process as blas

def limits():
    return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

taking = threading.Event()
plain = blas._Setting.take

def slowly(self):
    taking.set()
    time.sleep(0.3)
    plain(self)

blas._Setting.take = slowly
first = threading.Thread(target=blas.hold_for_process)
first.start()
taking.wait()
blas.hold_for_process()
print(json.dumps(sorted(set(limits()))))
first.join()
"""


def test_a_task_waits_until_the_task_beside_it_has_taken_the_limit():
    assert said(WAITING) == [1]
