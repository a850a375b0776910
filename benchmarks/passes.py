"""How many passes over the rows EM and its accelerators take to the optimum, beside `algorithm="auto"`.

    python benchmarks/passes.py --mnist mnist12456.npz                    # everything: hours
    python benchmarks/passes.py --data A B digits --seeds 20
    python benchmarks/passes.py --data C --methods em "auto (own start)" --json c.json --picture c.svg
    python benchmarks/passes.py --scale 200 --passes 60

All methods but those with a start of their own begin at the M-step of k-means of 20,000 rows, which is
counted for none of them. Work is rows scored over rows: samples, starts, partial and refused passes included.
For a start of its own, each of k-means' iterations counts the rows that it visits too, though it takes far
less time for each than EM does (the last column is that part of the work); the reading of all rows from which
samples are taken scores none and is not counted. The fits go on far beyond where they would stop by
themselves, until accepted bounds change by less than 1e-12. Where they would stop is a column of its own, but
for fits that measure their gap first: those "to its end" do, and stop by themselves.

A gap is in nats per row below the optimum of the method's own basin, to which its last point is continued by
quasi-Newton full passes. It is reached at the first pass over all rows with such a bound, whose bound is
exact, at the work that includes it. (Incremental EM makes no such passes: its log-likelihood after each sweep
is measured beside it.) An optimum that is "not settled" needs a larger --polish: gaps to it are too small.
Cells are means over the seeds that got there, work first, then seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import dask
from accelerators import ACCELERATORS, Pass
from passes_data import NAMES, Data, made, start
from passes_fits import (
    ENGINE,
    TIGHT,
    Fit,
    Setting,
    chunked,
    fit_accelerator,
    fit_engine,
    fit_scikit_learn,
    given,
    stop_of,
)

from emtau_dask import GaussianMixture
from emtau_dask.em.settings import DEFAULT_TOL
from emtau_dask.errors import SingularComponentError
from emtau_dask.mixture.parameters import MixtureParameters

LEAST_TRUE_GAP = 1e-10
"""Below that a gap says more of rounding than of the fit."""
FACTOR = 3.0
HEADS = ["own stop", "log-likelihood there", "gap there", "optimum below best", "refused", "k-means"]


METHODS = ["em", *list(ACCELERATORS)[1:], *list(ENGINE)[1:]]
SCIKIT_LEARN = "scikit-learn"
PAIRS = [("auto", "em"), *(("auto (own start)", other) for other in ("em (own start)", "em", SCIKIT_LEARN))]
JUDGED = ("auto", "auto (own start)", "em", "auto (to its end)", "auto (own start, to its end)")


@dataclass(frozen=True, eq=False)
class Outcome:
    """A fit beside the optimum of its own basin (nats per row).

    Where it is not ``settled``, further passes would have found more: gaps to it are too small.
    """

    data: str
    method: str
    seed: int
    rows: int
    free_parameters: int
    fit: Fit
    optimum: float
    settled: bool

    @property
    def gaps(self) -> dict[str, float]:
        sampling = self.free_parameters / (2 * self.rows)
        return {"1e-3": 1e-3, "p/2N": sampling, "0.1 p/2N": 0.1 * sampling, "1e-6": 1e-6, "1e-9": 1e-9}

    def reached(self, gap: float) -> Pass | None:
        return next((p for p in self.fit.passes if p.exact and self.optimum - p.bound <= gap), None)

    @property
    def stopped(self) -> Pass | None:
        return None if self.fit.stop is None else self.fit.passes[self.fit.stop]

    @property
    def refused(self) -> int:
        return sum(not each.accepted for each in self.fit.passes)

    @property
    def judged(self) -> list[tuple[float, float]]:
        """The estimated and the true gap of accepted full passes, where the true one is below p/2N."""
        pairs = [(p.gap, self.optimum - p.bound) for p in self.fit.passes if p.exact and p.accepted]
        return [pair for pair in pairs if LEAST_TRUE_GAP < pair[1] < self.gaps["p/2N"]]


def optimum_of(fit: Fit, data: Data, setting: Setting) -> tuple[float, bool]:
    """Return the best bound of a fit and of quasi-Newton passes from its end on, and whether they settled."""
    best = max((p.bound for p in fit.passes if p.exact and p.accepted), default=-math.inf)
    if fit.end is None:
        return best, False
    model = GaussianMixture(
        data.components,
        algorithm="em",
        acceleration="quasi-newton",
        tol=TIGHT,
        reg_covar=setting.reg_covar,
        max_iter=setting.polish,
        **given(fit.end),
    )
    with dask.config.set(scheduler="threads", num_workers=setting.threads):
        try:
            model.fit(chunked(data))
        except SingularComponentError:
            return best, False
    return max(best, model.lower_bound_), model.converged_


def compete(method: str, data: Data, seed: int, begun: MixtureParameters, setting: Setting) -> Outcome:
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if method in ENGINE:
            fit = fit_engine(ENGINE[method], data, begun, seed, setting)
        elif method == SCIKIT_LEARN:
            fit = fit_scikit_learn(data, seed, setting)
        else:
            fit = fit_accelerator(ACCELERATORS[method], data, begun, setting)
        fitted = time.perf_counter()
        optimum, settled = optimum_of(fit, data, setting)
    print(
        f"{data.name}, {method}, seed {seed}: {len(fit.passes)} passes in {fitted - began:.1f} s, "
        f"optimum {optimum:.9f}{'' if settled else ' at least'} after {time.perf_counter() - fitted:.1f} s",
        file=sys.stderr,
    )
    return Outcome(data.name, method, seed, len(data.rows), data.free_parameters, fit, optimum, settled)


def mean_of(passes: list[Pass | None]) -> str:
    """Return the mean work and seconds of the fits that got there, and of how many these are."""
    there = [each for each in passes if each is not None]
    if not there:
        return "–"
    work = statistics.mean(each.work for each in there)
    seconds = statistics.mean(each.seconds for each in there)
    some = "" if len(there) == len(passes) else f", {len(there)} of {len(passes)}"
    return f"{work:.1f} ({seconds:.2g} s{some})"


def bests(outcomes: list[Outcome]) -> dict[int, float]:
    """Return the best optimum that any method found, by seed."""
    seeds = {outcome.seed for outcome in outcomes}
    return {seed: max(each.optimum for each in outcomes if each.seed == seed) for seed in seeds}


def final(outcome: Outcome) -> float:
    """The exact log-likelihood where a fit stops by itself; where it does not, its best."""
    if outcome.stopped is not None:
        return outcome.stopped.bound
    return max((p.bound for p in outcome.fit.passes if p.exact and p.accepted), default=-math.inf)


def print_table(data: Data, outcomes: list[Outcome]) -> None:
    gaps = outcomes[0].gaps
    best = bests(outcomes)
    print(f"\n{data}; p = {data.free_parameters:,}, p/2N = {data.sampling_gap:.2g}\n")
    heads = ["method", *gaps, *HEADS]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for method in dict.fromkeys(outcome.method for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.method == method]
        finals = [final(each) for each in mine]
        cells = [method, *(mean_of([each.reached(gap) for each in mine]) for gap in gaps.values())]
        cells += [
            mean_of([each.stopped for each in mine]),
            f"{statistics.mean(finals):.6f}",
            f"{statistics.mean(each.optimum - bound for each, bound in zip(mine, finals, strict=True)):.1e}",
            f"{statistics.mean(best[each.seed] - each.optimum for each in mine):.1e}",
            f"{statistics.mean(each.refused for each in mine):.1f}",
            f"{statistics.mean(each.fit.starting_work for each in mine):.1f}",
        ]
        if unsettled := sum(not each.settled for each in mine):
            cells[heads.index("optimum below best")] += f" at most ({unsettled} not settled)"
        failed = sum(each.fit.failure is not None for each in mine)
        print("| " + " | ".join(cells) + (f" | {failed} failed |" if failed else " |"))


def print_likelihoods(data: Data, outcomes: list[Outcome]) -> None:
    """Print by how much "auto" ends above EM from the same seeds."""
    found = {(each.method, each.seed): final(each) for each in outcomes}
    unit = data.sampling_gap / 10
    for ours, theirs in PAIRS:
        seeds = [seed for method, seed in found if method == ours and (theirs, seed) in found]
        if not seeds:
            continue
        above = [(found[ours, seed] - found[theirs, seed]) / unit for seed in seeds]
        ends = [found[theirs, seed] for seed in seeds]
        print(
            f"{ours} ends above {theirs} by {statistics.mean(above):+.3g} p/20N (mean of {len(seeds)}; "
            f"{min(above):+.3g} to {max(above):+.3g}); {theirs}'s seeds differ by up to "
            f"{(max(ends) - min(ends)) / unit:.3g} p/20N"
        )


def print_gaps(outcomes: list[Outcome]) -> None:
    """Print how far reported gaps are from true ones below p/2N."""
    for method in JUDGED:
        judged = [pair for each in outcomes if each.method == method for pair in each.judged]
        if not judged:
            continue
        ratios = [estimate / true for estimate, true in judged if not math.isnan(estimate)]
        near = sum(1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
        extremes = f"; ratios {min(ratios):.2g} to {max(ratios):.2g}" if ratios else ""
        print(
            f"gap of {method} after passes: {near} of {len(judged)} within a factor of {FACTOR:g}, "
            f"{len(judged) - len(ratios)} NaN{extremes}"
        )
        ends = [(each.stopped, each.optimum) for each in outcomes if each.method == method]
        last = [
            end.gap / max(optimum - end.bound, LEAST_TRUE_GAP) for end, optimum in ends if end is not None
        ]
        close = sum(1 / FACTOR <= ratio <= FACTOR for ratio in last)
        print(
            f"gap_ where it stops: {close} of {len(ends)} within {FACTOR:g}; "
            + " ".join(f"{r:.2g}" for r in last)
        )


def stops(outcome: Outcome) -> dict[str, Pass | None]:
    """Return where the fit would end by each of some tolerances."""
    sampling, N = outcome.gaps["p/2N"], outcome.rows
    by = {
        "change < 1e-3": (1e-3, 0.0),
        "change < 1e-5": (DEFAULT_TOL, 0.0),
        "gap < 0.1 p/2N": (0.0, 0.1 * sampling),
        "gap < 0.01 p/2N": (0.0, 0.01 * sampling),
        "gap < 1/8N": (0.0, 1 / (8 * N)),
    }
    passes = outcome.fit.passes
    found = {name: stop_of(passes, *tolerances) for name, tolerances in by.items()}
    return {name: None if index is None else passes[index] for name, index in found.items()}


def print_tolerances(outcomes: list[Outcome]) -> None:
    """Print what tolerances would make of the fits of "auto": a gap g is √(2Ng) standard errors at most."""
    mine = [each for each in outcomes if each.method.startswith("auto")]
    if not mine:
        return
    print("\n| auto ends where | work, seconds | gap left | standard errors |\n|---|---|---|---|")
    ends = [stops(each) for each in mine]
    for name in ends[0]:
        there = [(each, end[name]) for each, end in zip(mine, ends, strict=True)]
        left = [max(0.0, each.optimum - found.bound) for each, found in there if found is not None]
        if left:
            errors = [math.sqrt(2 * mine[0].rows * gap) for gap in left]
            cells = [name, mean_of([found for _, found in there])]
            cells += [f"{statistics.mean(left):.1e}", f"{statistics.mean(errors):.2g}"]
            print("| " + " | ".join(cells) + " |")


def as_json(outcome: Outcome) -> dict[str, Any]:
    fields = ("data", "method", "seed", "rows", "free_parameters", "optimum", "settled")
    return {
        **{name: getattr(outcome, name) for name in fields},
        "stop": outcome.fit.stop,
        "failure": outcome.fit.failure,
        "starting_work": outcome.fit.starting_work,
        "passes": [asdict(each) for each in outcome.fit.passes],
    }


def draw(outcomes: list[Outcome], file: Path) -> None:
    """Draw gaps against work, a panel for each data set, of its first seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(outcome.data for outcome in outcomes))
    across = min(3, len(names))
    down = -(-len(names) // across)
    figure, axes = pyplot.subplots(down, across, figsize=(5 * across, 4 * down), squeeze=False)
    methods = list(dict.fromkeys(outcome.method for outcome in outcomes))
    for axis, name in zip(axes.flat, names, strict=False):
        of_data = [outcome for outcome in outcomes if outcome.data == name]
        for outcome in of_data:
            if outcome.seed == of_data[0].seed:
                exact = [p for p in outcome.fit.passes if p.exact and p.accepted]
                gaps = [max(outcome.optimum - p.bound, 1e-12) for p in exact]
                colour = f"C{methods.index(outcome.method)}"
                axis.loglog([p.work for p in exact], gaps, ".-", color=colour, label=outcome.method, lw=1)
        axis.axhline(of_data[0].gaps["p/2N"], color="grey", ls=":", lw=1)
        axis.set(title=name, xlabel="work, passes over all rows", ylabel="gap, nats per row")
    axes.flat[0].legend(fontsize="x-small")
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> list[Outcome]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--methods", nargs="+", choices=[*METHODS, SCIKIT_LEARN], default=METHODS)
    parser.add_argument("--mnist", type=Path, help="an .npz file with the images, for D")
    parser.add_argument("--scale", type=int, default=1, help="divide the numbers of rows by this")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=600, help="of each fit, at most")
    parser.add_argument("--polish", type=int, default=1000, help="passes to the optimum of a fit's basin")
    parser.add_argument("--reg-covar", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures of every pass there")
    parser.add_argument("--picture", type=Path, help="draw gaps against work there (needs matplotlib)")
    options = parser.parse_args(arguments)
    setting = Setting(options.threads, options.passes, options.polish, options.reg_covar)
    everything: list[Outcome] = []
    for name in options.data:
        data = made(name, options.scale, options.mnist)
        if data is None:
            print("D is left out: give its --mnist")
            continue
        outcomes = []
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            begun = start(data, seed, options.reg_covar)
            outcomes += [compete(method, data, seed, begun, setting) for method in options.methods]
        print_table(data, outcomes)
        print()
        print_likelihoods(data, outcomes)
        print_gaps(outcomes)
        print_tolerances(outcomes)
        print(flush=True, end="")
        everything += outcomes
        if options.json:
            options.json.write_text(json.dumps([as_json(outcome) for outcome in everything]))
    if options.picture and everything:
        draw(everything, options.picture)
    return everything


if __name__ == "__main__":
    main()
