"""Where fits by default settings end, beside EM's and scikit-learn's from the same seeds.

    python benchmarks/final_likelihoods.py --mnist mnist12456.npz          # all but B' and C: half an hour
    python benchmarks/final_likelihoods.py --data A tails --seeds 5 --methods auto em
    python benchmarks/final_likelihoods.py --data C --scale 10

Each fit has a start of its own, by its seed, and ends by its own tolerance: ``algorithm="auto"``,
``algorithm="em"`` with up to 2,000 iterations, and scikit-learn's `GaussianMixture` with its defaults. The
log-likelihood of each end is that of one more pass over all rows. p/20N is a tenth of what sampling error
costs, in nats per row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import dask
import numpy as np
from passes_data import NAMES, Data, made
from passes_fits import chunked
from sklearn.mixture import GaussianMixture as SklearnMixture
from threadpoolctl import threadpool_limits

from emtau_dask import GaussianMixture

MOST_ITERATIONS = 2000
SMALL = [name for name in NAMES if name not in ("B'", "C")]


@dataclass(frozen=True)
class End:
    """Where a fit ended: nats per row, passes over all rows, seconds."""

    likelihood: float
    work: float
    seconds: float
    converged: bool


def _ours(algorithm: str, data: Data, seed: int, threads: int) -> End:
    model = GaussianMixture(data.components, algorithm=algorithm, random_state=seed, max_iter=MOST_ITERATIONS)
    began = time.perf_counter()
    with dask.config.set(scheduler="threads", num_workers=threads):
        model.fit(chunked(data))
        seconds = time.perf_counter() - began
        likelihood = model.score(chunked(data))
    return End(float(likelihood), model.history_.work, seconds, model.converged_)


def _scikit_learn(data: Data, seed: int, threads: int) -> End:
    began = time.perf_counter()
    with threadpool_limits(threads):
        model = SklearnMixture(data.components, random_state=seed).fit(data.rows)
        seconds = time.perf_counter() - began
        likelihood = model.score(data.rows)
    return End(float(likelihood), float(model.n_iter_), seconds, model.converged_)


METHODS: dict[str, Callable[[Data, int, int], End]] = {
    "auto": lambda data, seed, threads: _ours("auto", data, seed, threads),
    "em": lambda data, seed, threads: _ours("em", data, seed, threads),
    "scikit-learn": _scikit_learn,
}


def ends_of(method: str, data: Data, seeds: range, threads: int) -> list[End]:
    found = []
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            end = METHODS[method](data, seed, threads)
        print(
            f"{data.name}, {method}, seed {seed}: {end.likelihood:.6f}, {end.work:.1f} passes, "
            f"{end.seconds:.1f} s{'' if end.converged else ', not converged'}",
            file=sys.stderr,
        )
        found.append(end)
    return found


def print_rows(data: Data, ends: dict[str, list[End]]) -> None:
    unit = data.sampling_gap / 10
    reference = [end.likelihood for end in ends.get("auto", [])]
    for method, found in ends.items():
        likelihoods = np.array([end.likelihood for end in found])
        cells = [
            data.name,
            method,
            f"{likelihoods.mean():.6f}",
            f"{likelihoods.min():.6f}",
            f"{likelihoods.max():.6f}",
            f"{np.ptp(likelihoods) / unit:.3g}",
            f"{(np.mean(reference) - likelihoods.mean()) / unit:+.3g}" if reference else "",
            f"{statistics.mean(end.work for end in found):.1f}",
            f"{statistics.mean(end.seconds for end in found):.2g}",
        ]
        print("| " + " | ".join(cells) + " |", flush=True)


HEADS = [
    "data",
    "method",
    "mean nats per row",
    "least",
    "greatest",
    "range, p/20N",
    "auto's mean above it, p/20N",
    "work",
    "seconds",
]


def main(arguments: list[str] | None = None) -> dict[str, dict[str, list[End]]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=NAMES, default=SMALL)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--mnist", type=Path, help="an .npz file with the images, for D")
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of rows by this")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    print("| " + " | ".join(HEADS) + " |\n|" + "---|" * len(HEADS))
    everything = {}
    for name in options.data:
        data = made(name, options.scale, options.mnist)
        if data is None:
            print("D is left out: give its --mnist", file=sys.stderr)
            continue
        ends = {
            method: ends_of(method, data, range(options.seeds), options.threads) for method in options.methods
        }
        print_rows(data, ends)
        everything[name] = ends
    return everything


if __name__ == "__main__":
    main()
