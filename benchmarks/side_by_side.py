"""What two processors gain: two threads of one fit, beside two fits that share nothing but the machine.

    python benchmarks/side_by_side.py
    python benchmarks/side_by_side.py --scale 1000 --turns 1 --iterations 3

Iterations on the same rows by one thread, by two threads, and by one thread in each of two processes that
fit at the same time. All take turns in the same few processes, so that they meet the same neighbours.
Printed are medians of the seconds of an iteration, and the gains: what one thread takes to what two threads
take, and twice what one thread takes to what each of two processes takes. What two processes gain and two
threads do not is lost to the interpreter's lock and to what only one thread does; the machine could do it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import dask
import dask.array as da
import numpy as np
from speed import WORK, Work, chunks_of, drawn, scaled

from emtau_dask import FullEM, GaussianMixture

OF_ONE_VARIANCE: dict[str, Callable[[int, int], np.ndarray]] = {
    "full": lambda K, d: np.tile(np.eye(d), (K, 1, 1)),
    "tied": lambda K, d: np.eye(d),
    "diag": lambda K, d: np.ones((K, d)),
    "spherical": lambda K, d: np.ones(K),
}
SHAPES = ["full-d4", "full-d16", "full-near", "diag-d16", "spherical-d16", "tied-d16"]


@dataclass(frozen=True)
class Gains:
    """Of one shape: seconds of an iteration by one thread, by two, and by each of two processes."""

    work: Work
    one: float
    threads: float
    processes: float

    @property
    def by_threads(self) -> float:
        return self.one / self.threads

    @property
    def by_processes(self) -> float:
        return 2 * self.one / self.processes


def known_start(work: Work, rows: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the true components' means, one variance for all, and equal weights."""
    means = np.array([rows[labels == k].mean(axis=0) for k in range(work.components)])
    variance = np.mean((rows - means[labels]) ** 2)
    precisions = OF_ONE_VARIANCE[work.covariance_type](work.components, work.features) / variance
    weights = np.full(work.components, 1 / work.components)
    return {"weights_init": weights, "means_init": means, "precisions_init": precisions}


def fit_when_asked(asked: Connection, work: Work, iterations: int) -> None:
    """Answer a number of threads with the seconds of iterations, until told None."""
    rows, labels = drawn(work)
    start = known_start(work, rows, labels)
    X = da.from_array(rows, chunks=(-(-len(rows) // chunks_of(work, 2)), -1))

    def seconds(threads: int) -> list[float]:
        mixture = GaussianMixture(
            work.components,
            covariance_type=work.covariance_type,
            algorithm=FullEM(),
            max_iter=iterations,
            tol=0.0,
            **start,
        )
        with warnings.catch_warnings(), dask.config.set(scheduler="threads", num_workers=threads):
            warnings.simplefilter("ignore")
            mixture.fit(X)
        return [record.seconds for record in mixture.history_][1:]

    asked.send(seconds(2))
    while (threads := asked.recv()) is not None:
        asked.send(seconds(threads))


def gains(work: Work, turns: int, iterations: int) -> Gains:
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    fitting = [
        context.Process(target=fit_when_asked, args=(theirs, work, iterations), daemon=True)
        for _, theirs in ends
    ]
    for process, (_, theirs) in zip(fitting, ends, strict=True):
        process.start()
        theirs.close()  # so that the end of a process is seen at the other
    first, second = (ours for ours, _ in ends)
    for end in (first, second):
        end.recv()

    def together(threads: int, *asked: Any) -> list[float]:
        for end in asked:
            end.send(threads)
        return [seconds for end in asked for seconds in end.recv()]

    one: list[float] = []
    two: list[float] = []
    each: list[float] = []
    for _ in range(turns):
        one += together(1, first)
        two += together(2, first)
        each += together(1, first, second)
    for end, process in zip((first, second), fitting, strict=True):
        end.send(None)
        process.join()
    return Gains(work, *map(statistics.median, (one, two, each)))


def main(arguments: list[str] | None = None) -> list[Gains]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=list(WORK), default=SHAPES)
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of rows by this")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=6, help="of each fit; the first is not counted")
    options = parser.parse_args(arguments)
    print("| rows × features, components | one thread, ms | gain of two threads | of two processes |")
    print("|---|---|---|---|", flush=True)
    found = []
    for name in options.work:
        each = gains(scaled(WORK[name], options.scale, None), options.turns, options.iterations)
        print(
            f"| {each.work} | {each.one * 1e3:.1f} | {each.by_threads:.2f} | {each.by_processes:.2f} |",
            flush=True,
        )
        found.append(each)
    return found


if __name__ == "__main__":
    main()
