"""The fits that `benchmarks/passes.py` and its neighbours compare, with what each of their passes took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import dask
import dask.array as da
import numpy as np
from accelerators import Limits, Pass, Rows, Scorer
from passes_data import Data
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture as SklearnMixture
from threadpoolctl import threadpool_limits

from emtau_dask import GaussianMixture
from emtau_dask.em import IterationRecord
from emtau_dask.em.history import SilentObserver
from emtau_dask.em.settings import DEFAULT_TOL, automatic, tolerances
from emtau_dask.errors import SingularComponentError
from emtau_dask.estimator.fitting import fit_estimator
from emtau_dask.mixture.parameters import MixtureParameters

CHUNK_BYTES = 2**22
TIGHT = 1e-12
SAMPLED_ITERATIONS = 4
"""Iterations that a fit with sampled passes may take for each pass that others may."""


@dataclass(frozen=True)
class Engine:
    """How the estimator is set; ``own`` for a start of its own, and ``short`` for an end of its own too."""

    settings: dict[str, Any]
    own: bool = False
    short: bool = False

    @property
    def auto(self) -> bool:
        return self.settings["algorithm"] == "auto"


ENGINE = {
    "em": Engine({"algorithm": "em"}),
    "quasi-newton": Engine({"algorithm": "em", "acceleration": "quasi-newton"}),
    "em-sampled": Engine({"algorithm": "em-sampled"}),
    "auto": Engine({"algorithm": "auto"}),
    "auto (own start)": Engine({"algorithm": "auto"}, own=True),
    "em (own start)": Engine({"algorithm": "em"}, own=True, short=True),
    "auto (to its end)": Engine({"algorithm": "auto"}, short=True),
    "auto (own start, to its end)": Engine({"algorithm": "auto"}, own=True, short=True),
}


@dataclass(frozen=True)
class Setting:
    """What all fits of a run share."""

    threads: int
    passes: int
    polish: int
    reg_covar: float


@dataclass(frozen=True, eq=False)
class Fit:
    """A fit's passes, its last parameters, after which pass it would have stopped, and why it failed.

    None where that is not known: a fit that measures its gap before it stops has to be run to its end.
    """

    passes: tuple[Pass, ...]
    end: MixtureParameters | None
    stop: int | None
    failure: str | None = None
    starting_work: float = 0.0


class Recorder(SilentObserver):
    """Keeps the records of iterations, when they were complete, and how much of k-means came before."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.records: list[IterationRecord] = []
        self.seconds: list[float] = []
        self.lloyd_passes: list[int] = []
        self.visited: list[int] = []
        self._passes = 0
        self._sampled: list[tuple[int, int]] = []

    def stage(self, name: str, chunks: int) -> None:
        self._passes += name.startswith("k-means ")

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        self.records.append(record)
        self.seconds.append(time.perf_counter() - self.began)
        self.lloyd_passes.append(self._passes)
        self.visited.append(sum(rows * iterations for rows, iterations in self._sampled))

    @property
    def sample_rows(self) -> int:
        """Rows of the sample on which k-means began."""
        return max((rows for rows, _ in self._sampled), default=0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the iterations of k-means on a sample, which no pass of the engine makes."""
        sampled = self._sampled

        class Counted(KMeans):
            def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Any:
                found = super().fit(X, y, sample_weight)
                sampled.append((len(X), int(self.n_iter_)))
                return found

        with patch("emtau_dask.em.starts.KMeans", Counted):
            yield


def given(parameters: MixtureParameters) -> dict[str, Any]:
    precisions = parameters.structure.precisions(parameters.precisions_cholesky)
    return {
        "weights_init": np.array(parameters.weights),
        "means_init": np.array(parameters.means),
        "precisions_init": precisions,
    }


def chunked(data: Data) -> da.Array:
    rows = max(1, CHUNK_BYTES // (8 * data.rows.shape[1]))
    return da.from_array(data.rows, chunks=(rows, -1))


def fit_engine(engine: Engine, data: Data, begun: MixtureParameters, seed: int, setting: Setting) -> Fit:
    N, p = len(data.rows), data.free_parameters
    sampled = engine.settings["algorithm"] != "em"
    options = {
        **engine.settings,
        "reg_covar": setting.reg_covar,
        "max_iter": setting.passes * (SAMPLED_ITERATIONS if sampled else 1),
        "tol": "auto" if engine.short else TIGHT,
        **({} if engine.own else given(begun)),
    }
    model = GaussianMixture(data.components, random_state=seed, **options)
    recorder = Recorder()
    failure = None
    with dask.config.set(scheduler="threads", num_workers=setting.threads), recorder.counting():
        try:
            fit_estimator(model, chunked(data), None, None, observer=recorder)
        except SingularComponentError as error:
            failure = str(error)
    shares = automatic(N, data.components, data.rows.shape[1], "full").shares if engine.auto else ()
    of_start = recorder.sample_rows if shares else N
    visited = [
        (rows + passes * of_start) / N
        for rows, passes in zip(recorder.visited, recorder.lloyd_passes, strict=True)
    ]
    scored = np.cumsum([record.active_rows / record.rows for record in recorder.records])
    passes = tuple(
        Pass(
            float(work + before),
            seconds,
            record.lower_bound,
            record.full_pass,
            record.accepted,
            record.gap,
        )
        for record, work, before, seconds in zip(
            recorder.records, scored, visited, recorder.seconds, strict=True
        )
    )
    tol, gap_tol = tolerances("auto", N, p, auto=engine.auto)
    end = None if failure else model.parameters_
    stop = None
    if engine.short:
        stop = max((i for i, each in enumerate(passes) if each.exact and each.accepted), default=None)
    elif not gap_tol:
        stop = stop_of(passes, tol, 0.0)
    return Fit(passes, end, stop, failure, visited[-1] if visited else 0.0)


def stop_of(passes: tuple[Pass, ...], tol: float, gap_tol: float) -> int | None:
    """Return the index of the pass after which a fit with these tolerances ends."""
    before = None
    for index, each in enumerate(passes):
        if not each.exact:
            continue
        small = before is not None and abs(each.bound - before) < tol
        if each.accepted and (small or each.gap < gap_tol):
            return index
        before = each.bound if each.accepted else None
    return None


def fit_accelerator(
    accelerate: Callable[[Scorer], None], data: Data, begun: MixtureParameters, setting: Setting
) -> Fit:
    rows = Rows(data.rows, data.components, setting.threads)
    score = Scorer(rows, begun, setting.reg_covar, Limits(setting.passes, TIGHT))
    failure = None
    try:
        accelerate(score)
    except SingularComponentError as error:
        failure = str(error)
    passes = tuple(score.passes)
    return Fit(passes, score.parameters, stop_of(passes, DEFAULT_TOL, 0.0), failure)


def fit_scikit_learn(data: Data, seed: int, setting: Setting) -> Fit:
    """Return the end of a fit by scikit-learn's own defaults; nothing of earlier passes or of k-means."""
    began = time.perf_counter()
    with threadpool_limits(setting.threads):
        model = SklearnMixture(data.components, random_state=seed).fit(data.rows)
    last = Pass(float(model.n_iter_), time.perf_counter() - began, model.lower_bound_)
    factors = model.precisions_cholesky_
    end = MixtureParameters("full", model.weights_, model.means_, model.covariances_, factors)
    return Fit((last,), end, 0)
