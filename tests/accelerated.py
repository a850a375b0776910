"""Fits with every part of what makes them take few passes, on few rows; shared by several tests."""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dask
import numpy as np
import pytest
from oracles import naive

from emtau_dask import GaussianMixture
from emtau_dask.em import loop
from emtau_dask.fit import resolving


@contextmanager
def few_rows_suffice(least=30, per_parameter=2):
    """Samples and sampled rows are used on thousands of rows, where else millions are wanted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "LEAST_SAMPLE", least)
        patch.setattr(resolving, "ROWS_PER_PARAMETER", per_parameter)
        yield


@dataclass(frozen=True)
class Iteration:
    """One iteration: its record, the parameters that were scored, and how they were found."""

    record: Any
    scored: Any
    kind: str
    level: int
    in_cycle: bool
    heat: int
    chosen: bool
    state: Any

    @property
    def stage(self):
        """What was scored, in a word."""
        if self.in_cycle:
            return "cycle"
        if self.record.full_pass:
            return "all rows" if self.record.accepted else "refused"
        if self.heat:
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
                progress.ascent.trial.kind.value,
                progress.level,
                progress.cycle is not None,
                progress.heat,
                progress.chosen,
                after,
            )
        )
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "advance", noted)
        yield found


def quiet_fit(X, n_components, *, sample_weight=None, **settings):
    """Fit by one thread, without warnings."""
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        return GaussianMixture(n_components, **settings).fit(X, sample_weight=sample_weight)


def log_likelihood(rows, weights, parameters):
    """Mean over (weighted) rows, written out; nats per row."""
    covariances = naive.unpacked(
        np.asarray(parameters.covariances), parameters.covariance_type, *parameters.means.shape
    )
    theta = naive.Theta(parameters.weights, parameters.means, covariances)
    return float(np.average(naive.log_likelihoods(rows, theta), weights=weights))
