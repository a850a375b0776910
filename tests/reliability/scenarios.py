"""Small fits that cover every algorithm, and what children of a `Zygote` do with them."""

import hashlib
import os
import resource
import shutil
import signal
import threading
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import dask
import dask.array as da
import numpy as np

from emtau_dask import EMLazy, EMSampled, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.checkpoint import reader
from emtau_dask.checkpoint.reader import read_commit, read_newest
from emtau_dask.estimator import fitting
from emtau_dask.storage import files
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.stores import LocalObjects
from reliability.boundaries import Boundaries

CHUNKS = (28, 0, 30, 22)
_random = np.random.default_rng(11)
ROWS = np.concatenate([_random.normal(centre, 1.0, (n, 2)) for centre, n in ((-3, 20), (0, 40), (3, 20))])
_random.shuffle(ROWS)
WEIGHTS = _random.integers(0, 3, len(ROWS)).astype(float)
for _array in (ROWS, WEIGHTS):
    _array.setflags(write=False)

ALGORITHMS = {
    "em": FullEM(),
    "em-tau": EMTau(tau=2, revisit=None),
    "em-tau, revisit": EMTau(tau=2, revisit="on-empty"),
    "em-tau, revisit=2": EMTau(tau=2, revisit=2),
    "em-star": EMStar(),
    "em-lazy": EMLazy(threshold=0.9, full_every=2),
    "em-sampled": EMSampled(share=0.5, most=2),
}


@dataclass(frozen=True)
class Scenario:
    """A fit.

    Attributes
    ----------
    algorithm : str
        Of `ALGORITHMS`.
    checkpoint_every, max_iter, n_init : int
    weighted : bool
    scheduler : str
    then : int or None
        A second, larger ``max_iter``, with which the finished fit goes on.
    together : bool
        Whether chunks share a task, and their row state an object.
    """

    algorithm: str
    checkpoint_every: int = 1
    max_iter: int = 5
    n_init: int = 1
    weighted: bool = False
    scheduler: str = "synchronous"
    then: int | None = None
    together: bool = False

    def __str__(self):
        extras = [f"every={self.checkpoint_every}"]
        extras += [f"n_init={self.n_init}"] if self.n_init > 1 else []
        extras += ["weights"] if self.weighted else []
        extras += ["threads"] if self.scheduler == "threads" else []
        extras += [f"then max_iter={self.then}"] if self.then else []
        extras += ["together"] if self.together else []
        return f"{self.algorithm}, {', '.join(extras)}"

    @property
    def fit_options(self):
        return {"sample_weight": WEIGHTS} if self.weighted else {}

    def model(self, folder):
        return GaussianMixture(
            3,
            algorithm=ALGORITHMS[self.algorithm],
            random_state=3,
            max_iter=self.max_iter,
            n_init=self.n_init,
            tol=0.0,
            checkpoint=folder,
            checkpoint_every=self.checkpoint_every,
        )


EVERY = tuple(Scenario(name, every) for name in ALGORITHMS for every in (1, 3))
"""Every algorithm, with a commit after every iteration and after every third."""
SPECIAL = (
    Scenario("em-tau, revisit", n_init=3, max_iter=3),
    Scenario("em-tau", checkpoint_every=3, weighted=True),
    Scenario("em-lazy", weighted=True, scheduler="threads"),
    Scenario("em-star", scheduler="threads"),
    Scenario("em-tau, revisit", checkpoint_every=3, max_iter=3, then=6),
    Scenario("em-lazy", scheduler="threads", together=True),
    Scenario("em-tau", checkpoint_every=3, weighted=True, together=True),
    Scenario("em-tau, revisit", together=True),
)


@dataclass(frozen=True)
class Outcome:
    """How a process ended that was not killed.

    Attributes
    ----------
    bits : dict of str to str
        Digests of what a finished fit consists of; empty where it failed.
    error : str
        The kind of error; empty where it finished.
    message : str
    kinds : tuple of str
        The error's classes.
    litter : tuple of str
        Objects that no kept commit refers to, and temporary files.
    steps : int
        Steps by which it changed the disk.
    seconds : float
    """

    bits: dict
    error: str = ""
    message: str = ""
    kinds: tuple = ()
    litter: tuple = ()
    steps: int = 0
    seconds: float = 0.0

    def __str__(self):
        return f"{self.error}: {self.message}" if self.error else "finished"


def rows_of(scenario):
    plain = da.from_array(ROWS, chunks=(CHUNKS, 2))
    return plain if scenario.together else plain.map_blocks(np.copy)


def bits_of(model, folder):
    """Return digests of parameters, history and row state (by chunk) of a finished fit.

    The bytes that were read depend on what the process has cached, as seconds do on the machine.
    """
    parameters = ("weights_", "means_", "covariances_", "precisions_cholesky_")
    found = {name: np.asarray(getattr(model, name)).tobytes() for name in parameters}
    found["history"] = repr(
        [replace(record, seconds=0.0, bytes_read=0) for record in model.history_]
    ).encode()
    found["end"] = f"{model.n_iter_} {model.stop_reason_} {model.lower_bounds_!r}".encode()
    objects = LocalObjects(str(folder))
    current = read_newest(open_log(objects)).state.current
    for chunk, n_rows in enumerate(CHUNKS):
        slot = current.row_state.get(chunk)
        state = {} if slot is None else slot.read(objects, n_rows)
        found[f"row state of chunk {chunk}"] = repr(
            {name: values.tolist() for name, values in state.items()}
        ).encode()
    return {name: hashlib.sha256(value).hexdigest() for name, value in found.items()}


def litter_of(folder):
    """Return the objects that no commit refers to, without documents and the arrays that a fit leaves."""
    log = open_log(LocalObjects(str(folder)))
    used = set().union(*(read_commit(log, number).references for number in log.numbers()))
    kept = {key for key in log.objects.list("") if Path(key).name == "zarr.json" or key.startswith("rows/")}
    return tuple(key for key in log.objects.list("") if key not in used | kept)


def _outcome(work, folder, boundaries):
    began = time.perf_counter()
    answer = {"bits": {}}
    try:
        model = work()
        answer["bits"] = bits_of(model, folder)
        answer["litter"] = litter_of(folder) if boundaries.count else ()
    except Exception as error:
        answer |= {
            "error": type(error).__name__,
            "message": str(error),
            "kinds": tuple(kind.__name__ for kind in type(error).__mro__),
        }
    return Outcome(**answer, steps=boundaries.count, seconds=time.perf_counter() - began)


def _watch(at, delays):
    warnings.simplefilter("ignore")
    return Boundaries(at, delays).install()


def fit(scenario, folder, at=None, delays=None, overwrite=False):
    """Fit from the start; where the scenario says so, go on with a larger ``max_iter``."""
    boundaries = _watch(at, delays)

    def work():
        with dask.config.set(scheduler=scenario.scheduler):
            model = scenario.model(folder)
            fitting.fit_estimator(
                model, rows_of(scenario), scenario.fit_options.get("sample_weight"), None, overwrite=overwrite
            )
            if scenario.then is None:
                return model
            return GaussianMixture.resume(
                folder, rows_of(scenario), max_iter=scenario.then, **scenario.fit_options
            )

    return _outcome(work, folder, boundaries)


def fit_without_exclusive_rename(scenario, folder, at):
    """Fit where the C library has no ``renameat2``."""
    files._renameat2 = lambda: None
    return fit(scenario, folder, at)


def resume(scenario, folder, at=None, delays=None, meeting=None):
    """Go on with what is there; ``meeting`` is a pipe end to wait on once the commit has been read."""
    boundaries = _watch(at, delays)

    def work():
        with dask.config.set(scheduler=scenario.scheduler):
            if meeting is not None:
                _meet(meeting)
            return GaussianMixture.resume(
                folder, rows_of(scenario), max_iter=scenario.then, **scenario.fit_options
            )

    return _outcome(work, folder, boundaries)


def _meet(meeting):
    """Wait, after the next commit is read, until everyone who is to come is there."""
    folder, name, expected = meeting
    plain = reader.read_newest

    def read_and_wait(log):
        saved = plain(log)
        Path(folder, name).touch()
        while len(list(Path(folder).iterdir())) < expected:
            time.sleep(0.001)
        return saved

    reader.read_newest = read_and_wait


def limited_memory(megabytes, stack=2**18):
    """Let this process grow by so much and no more; threads' stacks, which count, are made small."""
    threading.stack_size(stack)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def differences(found, expected):
    """Return the names of parts whose bits differ."""
    return [name for name in expected if found.get(name) != expected[name]]


def copied(source, target):
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target


with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
    warnings.simplefilter("ignore")
    # What a process's first fit imports and looks up once; children should find it there.
    GaussianMixture(3, max_iter=1, random_state=3).fit(da.from_array(ROWS, chunks=(CHUNKS, 2)))
SIGKILL, SIGSTOP, SIGCONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT
