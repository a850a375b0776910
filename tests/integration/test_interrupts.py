"""Interrupts at many instants: they come out as such, what a fit sets for the process is set back, bits stay.

In processes of their own. `benchmarks/terminations.py` ends many more command lines under load.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from reliability.terminations import INTERRUPTED, bits, make_rows, terminated, undisturbed
from reliability.zygote import Zygote

pytestmark = pytest.mark.kills
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
    "Interrupt work n times, spread over what it takes; look at the settings each time, and after more work."
    work()
    usual, span = settings(), seconds_of(work)
    ends, changed, for_good = [], [], []
    for i in range(n):
        ends.append(interrupted(work, 1e-5 + span * i / n))
        if settings() != usual:  # It fell just where they are set back.
            changed.append(settings())
            work()
            for_good += [settings()] * (settings() != usual)
    return sorted(set(ends)), changed, for_good
"""

FITS = """
found = {}
cases = {"array": (X, "threads"), "chunks": (CHUNKED, "threads"), "one thread": (CHUNKED, "synchronous")}
for name, (rows, scheduler) in cases.items():
    with dask.config.set(scheduler=scheduler):
        fit = lambda: model().fit(rows)
        expected = bits(fit())
        found[name] = [*during(fit, 50), bits(fit()) == expected]
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
    found[name] = [*during(call, 25), (fitted.score(CHUNKED), fitted.predict(X).tobytes()) == expected]
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


EACH = """
from emtau_dask.storage.files import each
work, expected = lambda: each(lambda item: 2 * item, range(6)), [0, 2, 4, 6, 8, 10]
"""

PASS = """
from functools import partial
from emtau_dask.em.history import SilentObserver
from emtau_dask.execution.executor import MapReduce
from emtau_dask.execution.threads import ThreadExecutor
costs = dict.fromkeys(range(6), 2.0**30)
a_pass = MapReduce(lambda i: [2 * i], partial(sum, start=[]), [], {i: i for i in costs}, "test", "", costs)
work, expected = lambda: ThreadExecutor(2).map_reduce(a_pass, SilentObserver()), [0, 2, 4, 6, 8, 10]
"""

EVERYWHERE = """
import dis, faulthandler, sys
from emtau_dask import interrupts
interrupts.LEAVE_SECONDS = 0.05
AFTER = ("CALL", "RESUME", "JUMP_BACKWARD")  # where Python lets a handler of signals run

def interrupted_at(n):
    "Interrupt work at the n-th place where an interrupt may fall, and return how many there are."
    places, last = 0, {}
    def trace(frame, event, _):
        nonlocal places
        frame.f_trace_opcodes = True
        if event == "opcode":
            places += last.get(frame, "").startswith(AFTER)
            last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if places == n:
                raise KeyboardInterrupt
        return trace
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return places

assert work() == expected
places = interrupted_at(-1)
for n in range(1, places, 1 + places // 1000):
    faulthandler.dump_traceback_later(30, exit=True)
    interrupted_at(n)
    assert work() == expected, n
print(places)
"""


@pytest.mark.parametrize("work", [EACH, PASS], ids=["calls side by side", "a pass in threads"])
def test_after_an_interrupt_anywhere_the_next_call_ends_and_so_does_the_interpreter(work):
    """Also in what they call of Python's own, where an interrupt may leave a lock taken."""
    command = [sys.executable, "-c", work + EVERYWHERE]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 100


COMMAND = """
import click, ctypes, gc, os, signal, threading, time
from emtau_dask.cli.terminal import ExitGroup, remember_resume
from emtau_dask.interrupts import interruptible

def say(word):
    print(word, flush=True)

@click.group(cls=ExitGroup)
def main(): pass

@main.command()
@click.pass_context
def work(ctx):
    remember_resume(ctx, "run.zarr", [])
    {body}
    say("done")

main()
"""
DEAF = {
    "drops it": """
    def callback(*_):
        gc.callbacks.remove(callback)
        say("begun")
        time.sleep(60)  # Python writes what is raised here, and goes on.
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(60)
""",
    "never looks": """
    with interruptible():
        say("begun")
        time.sleep(60)
""",
    "is in a call of C": """
    say("begun")
    lock = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
    ctypes.CDLL(None).pthread_mutex_lock(lock)
""",
    "swallows it": """
    while True:
        try:
            say("begun")
            time.sleep(60)
        except BaseException:
            pass
""",
    "has no standard error": """
    os.close(2)
    with interruptible():
        say("begun")
        time.sleep(60)
""",
    "has nobody to read what it says": """
    os.set_blocking(2, False)
    try:
        while True:
            os.write(2, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(2, True)
    with interruptible():
        say("begun")
        time.sleep(60)
""",
}
"""Commands that an interrupt does not end."""
RESUMED_BY = r"emtau: interrupted; .* is intact\. Resume with: emtau resume run\.zarr"
CLEANS_UP = """
    try:
        say("begun")
        time.sleep(60)
    finally:
        time.sleep(0.5)
        say("cleaned up")
"""
FORKS = """
    say("begun")
    child = os.fork()
    if child == 0:
        time.sleep(60)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    time.sleep(0.5)
"""
LOGS = """
    import logging, sys
    sys.setswitchinterval(60)  # The thread that watches for signals comes later.
    say("begun")
    try:
        while True:
            sum(range(1000))
    except KeyboardInterrupt:
        logging.error("a task of a library was cut off")
        raise
"""
LEAVES_A_CHILD = """
    say("begun")
    child = os.fork()
    if child == 0:
        for number in range(3):
            os.close(number)
        time.sleep(30)
        os._exit(0)
"""


def begun(body):
    """A command line that has begun to work."""
    command = [sys.executable, "-c", COMMAND.replace("    {body}", body.strip("\n")), "work"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_command_that_an_interrupt_does_not_end_is_ended():
    processes = {name: begun(body) for name, body in DEAF.items()}
    for process in processes.values():
        process.send_signal(signal.SIGTERM)
    for name, process in processes.items():
        assert process.wait(30) == 130, name
        errors = process.communicate()[1]
        if not name.startswith("has no"):
            assert re.fullmatch(RESUMED_BY, errors.splitlines()[-1]), name


@pytest.mark.sample
def test_a_second_interrupt_ends_a_command_at_once():
    process = begun(DEAF["swallows it"])
    process.send_signal(signal.SIGINT)
    time.sleep(1.5)
    second = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert time.monotonic() - second < 5  # Else it would have been 6.5.
    assert re.fullmatch(RESUMED_BY, process.communicate()[1].splitlines()[-1])


def test_an_interrupt_that_is_sent_twice_lets_the_command_clean_up():
    process = begun(CLEANS_UP)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.05)
    assert process.wait(30) == 130
    output, errors = process.communicate()
    assert output == "cleaned up\n"
    said = "emtau: interrupted before the first commit; there is nothing to resume"
    assert errors.splitlines()[-1] == said


def test_what_libraries_log_of_an_interrupt_is_not_shown():
    process = begun(LOGS)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    (said,) = process.communicate()[1].splitlines()
    assert said == "emtau: interrupted before the first commit; there is nothing to resume"


@pytest.mark.sample
def test_a_signal_to_a_forked_process_does_not_interrupt_its_parent():
    process = begun(FORKS)
    assert process.wait(30) == 0
    assert process.communicate()[0] == "done\n"


def test_a_command_ends_though_a_process_that_it_forked_goes_on():
    process = begun(LEAVES_A_CHILD)
    began = time.monotonic()
    assert process.wait(30) == 0
    assert time.monotonic() - began < 15  # Else it would have been 30.


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
    for name, (ends, changed, for_good, same) in answer(script).items():
        assert "KeyboardInterrupt" in ends, name
        assert set(ends) <= {"", "KeyboardInterrupt"} | DASKS_OWN.get(name, set()), name
        assert len(changed) <= 1, name
        assert for_good == [], name
        assert same, name


def test_a_fit_interrupted_at_any_instant_is_resumed_to_the_same_bits(tmp_path):
    ends, wrong, resumed = answer(CHECKPOINTS, tmp_path)
    assert set(ends) <= {"", "KeyboardInterrupt"}
    assert wrong == []
    assert resumed


@pytest.fixture(scope="module")
def zygote():
    with Zygote("reliability.terminations") as started:
        yield started


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    make_rows(folder)
    return folder / "rows.zarr"


@pytest.mark.parametrize(
    ("way", "stage", "begun_as_a_users"),
    [
        pytest.param("two threads", "fingerprint", True, marks=pytest.mark.sample),
        ("auto", "sample", False),
        ("one thread", "an iteration", False),
        ("two threads", "first iterations", False),
    ],
)
def test_a_termination_ends_a_fit_in_time_and_it_is_resumed_to_the_same_bits(
    request, rows, tmp_path, way, stage, begun_as_a_users
):
    """Before the first commit there is nothing to resume."""
    zygote = None if begun_as_a_users else request.getfixturevalue("zygote")
    shutil.copytree(rows, tmp_path / "ended/rows.zarr")
    ended = terminated(way, stage, signal.SIGTERM, 0.0, tmp_path / "ended", zygote)
    assert ended.code == INTERRUPTED
    assert "cut off" not in ended.said
    if stage != "fingerprint":
        assert ended.resumed
        shutil.copytree(rows, tmp_path / "undisturbed/rows.zarr")
        assert bits(tmp_path / "ended") == undisturbed(way, tmp_path / "undisturbed", zygote)
