"""Seconds of a default fit and of scikit-learn's to the same log-likelihood, from one start.

    python benchmarks/seconds_to_optimum.py                    # C and B': half an hour, 6 GB of memory
    python benchmarks/seconds_to_optimum.py --data C --scale 8 --passes 1000

Both begin at the M-step of k-means of 20,000 rows. What is to be reached is the best bound that the default
fit or EM found, less 0.1 p/2N; where between two passes EM got there is interpolated.

scikit-learn would take hours. Its iterations are EM's, and so are ours with ``algorithm="em"``: these say how
many are needed. scikit-learn's own are timed over a few, whose bounds are compared with ours ("differ by"),
and its seconds are that many times the seconds of one. Where EM is not there after ``--passes``, the ratio is
a lower bound.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from passes_data import NAMES, Data, made, start
from passes_fits import ENGINE, Fit, Setting, fit_engine, given
from sklearn.mixture import GaussianMixture as SklearnMixture
from threadpoolctl import threadpool_limits

from emtau_dask.mixture.parameters import MixtureParameters

TIMED = 3


@dataclass(frozen=True)
class Race:
    """How long both take, and whether EM got there."""

    ours: float
    work: float
    iterations: float
    there: bool
    seconds_each: float
    difference: float

    @property
    def ratio(self) -> float:
        return self.iterations * self.seconds_each / self.ours


def scikit_learn(data: Data, begun: MixtureParameters, threads: int) -> tuple[float, np.ndarray]:
    """Return the seconds of an iteration, and the bounds of the first ones."""

    def fitted(iterations: int) -> tuple[float, SklearnMixture]:
        model = SklearnMixture(
            data.components,
            init_params="random",
            random_state=0,
            tol=0.0,
            reg_covar=0.0,
            max_iter=iterations,
            **given(begun),
        )
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(data.rows)
        return time.perf_counter() - began, model

    with threadpool_limits(threads):
        fitted(1)  # so that what follows finds memory
        first, _ = fitted(1)
        more, model = fitted(1 + TIMED)
    return (more - first) / TIMED, np.asarray(model.lower_bounds_)


def reached(fit: Fit, target: float) -> tuple[float, float] | None:
    """Return seconds and work at which a fit has the bound: linear between passes over all rows."""
    kept = [each for each in fit.passes if each.exact and each.accepted]
    if kept and kept[0].bound >= target:
        return kept[0].seconds, kept[0].work
    for before, after in pairwise(kept):
        if after.bound >= target:
            share = (target - before.bound) / (after.bound - before.bound)
            seconds = before.seconds + share * (after.seconds - before.seconds)
            return seconds, before.work + share * (after.work - before.work)
    return None


def race(data: Data, seed: int, setting: Setting) -> Race:
    begun = start(data, seed, setting.reg_covar)
    auto = fit_engine(ENGINE["auto (to its end)"], data, begun, seed, setting)
    passes = auto.passes
    em = fit_engine(ENGINE["em"], data, begun, seed, setting)
    best = max(each.bound for each in (*auto.passes, *em.passes) if each.exact and each.accepted)
    target = best - 0.1 * data.sampling_gap
    there, needed = reached(auto, target), reached(em, target)
    assert there is not None, (
        f"the default fit ends below EM, by more than 0.1 p/2N: {passes[-1].bound}, {best}"
    )
    iterations = needed[1] if needed is not None else float(len(em.passes))
    seconds, bounds = scikit_learn(data, begun, setting.threads)
    ours = np.array([each.bound for each in em.passes[: len(bounds)]])
    # scikit-learn's bound of an iteration is that of the parameters before it, as ours.
    return Race(
        *there, iterations, needed is not None, seconds, float(np.abs(ours - bounds[: len(ours)]).max())
    )


def main(arguments: list[str] | None = None) -> list[Race]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=NAMES, default=["C", "B'"])
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of rows by this")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=600, help="of each fit, at most")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    setting = Setting(options.threads, options.passes, 0, 0.0)
    print(
        "| data | seed | auto, s (work) | EM iterations | scikit-learn, s each | differ by | times faster |"
    )
    print("|---|---|---|---|---|---|---|")
    races = []
    for name in options.data:
        data = made(name, options.scale, None)
        assert data is not None
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            found = race(data, seed, setting)
            least = "" if found.there else "> "
            print(
                f"| {name} | {seed} | {found.ours:.2f} ({found.work:.1f}) | {least}{found.iterations:.1f} | "
                f"{found.seconds_each:.2f} | {found.difference:.0e} | {least}{found.ratio:.0f} |",
                flush=True,
            )
            races.append(found)
    return races


if __name__ == "__main__":
    main()
