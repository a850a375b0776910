"""Fits with every part of what makes them take few passes, on few rows; shared by several tests."""

import os
import signal
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dask
import numpy as np
import pytest
from oracles import naive
from references import theta_of

from emtau_dask import GaussianMixture
from emtau_dask.em import fit as fitting_loop
from emtau_dask.em import loop
from emtau_dask.em import settings as resolving
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting


@contextmanager
def few_rows_suffice(least=30, per_parameter=2, in_memory=0):
    """Samples and sampled rows are used on thousands of rows, where else millions are wanted.

    Starts are compared by passes over their sample, or in memory if it has at most so many rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting_loop, "has_few_rows", lambda n_rows, *shape: n_rows <= in_memory)
        patch.setattr(resolving, "MIN_SAMPLE_ROWS", least)
        patch.setattr(resolving, "MIN_ROWS_PER_PARAMETER", per_parameter)
        yield


@dataclass(frozen=True)
class Iteration:
    """One iteration: its record, the parameters that were scored, and how they were found."""

    record: Any
    scored: Any
    kind: str
    level: int
    in_cycle: bool
    annealed_passes: int
    chosen: bool
    state: Any

    @property
    def stage(self):
        """What was scored, in a word."""
        if self.in_cycle:
            return "cycle"
        if self.record.full_pass:
            return "all rows" if self.record.accepted else "refused"
        if self.annealed_passes:
            return "annealed"
        return f"sample {self.level}" if self.chosen else "contest"


@contextmanager
def iterations():
    """Collect an `Iteration` for each one that a fit makes; all starts'."""
    found, plain = [], loop.advance

    def noted(problem, state, settings, writer):
        after = plain(problem, state, settings, writer)
        progress = state.progress
        found.append(
            Iteration(
                after.records[-1],
                state.parameters,
                progress.quasi_newton.proposal.kind.value,
                progress.sample_index,
                progress.cycle is not None,
                progress.annealed_passes,
                progress.chosen,
                after,
            )
        )
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "advance", noted)
        yield found


def quiet_fit(X, n_components, *, sample_weight=None, workers=None, **settings):
    """Fit by one thread, or by so many of dask's, without warnings."""
    config = {"scheduler": "threads", "num_workers": workers} if workers else {"scheduler": "synchronous"}
    with warnings.catch_warnings(), dask.config.set(config):
        warnings.simplefilter("ignore")
        return GaussianMixture(n_components, **settings).fit(X, sample_weight=sample_weight)


def log_likelihood(rows, weights, parameters):
    """Mean over (weighted) rows, written out; nats per row."""
    return float(np.average(naive.log_likelihoods(rows, theta_of(parameters)), weights=weights))


def seen(record):
    """What is the same in a fit that was resumed: all but its time and what was read."""
    return repr(replace(record, seconds=0.0, bytes_read=0))


def bits_of(model):
    """The bits of a fit's parameters, and its history."""
    names = ("weights_", "means_", "covariances_", "precisions_cholesky_")
    found = {name: np.asarray(getattr(model, name)).tobytes() for name in names}
    found["history"] = [seen(record) for record in model.history_]
    found["end"] = (model.stop_reason_, model.lower_bound_, repr(model.gap_), model.history_.notes)
    return found


class Interrupting(SilentObserver):
    """Does something once so many iterations are scored, before the last of them is saved."""

    def __init__(self, iterations, action):
        self.left, self.action = iterations, action

    def iteration(self, record, parameters):
        self.left -= 1
        if not self.left:
            self.action()


def interrupt():
    raise KeyboardInterrupt


@contextmanager
def interrupted(iterations, action=interrupt):
    """Fits are interrupted while they make their iteration of this number, from 1; 0 for never."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "observer_for", lambda verbose: Interrupting(iterations, action))
        yield


def resumed(checkpoint, X, **options):
    """Resume by one thread, without warnings."""
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        return GaussianMixture.resume(checkpoint, X, **options)


def fit_and_die(X, checkpoint, iteration, settings):
    """In a process of its own: fit, and kill it while it makes an iteration."""
    with few_rows_suffice(), interrupted(iteration, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        quiet_fit(X, checkpoint=checkpoint, **settings)
    return "finished"
