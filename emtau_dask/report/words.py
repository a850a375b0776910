"""How a fit went, in words: why it stopped, what its gap means, what its reader should know."""

from __future__ import annotations

import math
from types import MappingProxyType

import numpy as np

from emtau_dask.estimator import GaussianMixture
from emtau_dask.mixture.model import free_parameters
from emtau_dask.report.subject import Subject

STOPPED = MappingProxyType(
    {
        "tol": "The fit converged. It stopped by its tolerance: more iterations would change little.",
        "no-active-rows": "The fit ended because no row was active any more: each had stayed in its "
        "component. That does not say that the likelihood is at a maximum.",
        "max-iter": "The fit did not converge. It stopped at the greatest number of iterations.",
    }
)
STATES = MappingProxyType(
    {"tol": "Converged", "no-active-rows": "Ended without active rows", "max-iter": "Not converged"}
)
FLOOR = 1.5
"""A variance below this many times ``reg_covar`` consists of it for the most part."""
ROWS_PER_FEATURE = 2
MOST_NAMED = 5
MANY = 1e5


def state(subject: Subject) -> str:
    """Return how a fit ended, in a word or two."""
    if not subject.finished:
        return "Not finished"
    return STATES[subject.model.stop_reason_]


def ending(subject: Subject) -> str:
    """Return why a fit stopped."""
    if not subject.finished:
        return (
            f"The run has not ended. This is its state after {subject.model.n_iter_:,} iterations; "
            "it can be resumed."
        )
    return STOPPED[subject.model.stop_reason_]


def gap_meaning(subject: Subject) -> str:
    """Return what the estimated gap says, and what it is to be compared with."""
    gap, rows = subject.model.gap_, subject.rows
    if not math.isfinite(gap) or not rows:
        return (
            "There is no estimate of how far the bound is from where the fit would end. Traditional EM has "
            "one after three passes, quasi-Newton steps after one."
        )
    error = n_parameters(subject.model) / (2 * rows)
    return (
        f"The lower bound is estimated to be {gap:.2g} nats per row below where this fit would end. That "
        "is an estimate from the last steps, for this optimum; another start may find a better one. For "
        f"comparison: a sample of {rows:,} rows itself leaves about {error:.2g} nats per row open "
        f"(p/2N), {compared(error, gap)}."
    )


def compared(error: float, gap: float) -> str:
    """Return how many times larger sampling error is than the gap."""
    if gap <= 0 or error / gap >= MANY:
        return "far more than the gap"
    if error >= gap:
        return (
            f"{error / gap:,.2g} times the gap" if error < 10 * gap else f"{error / gap:,.0f} times the gap"
        )
    return f"less than the gap, by a factor of {min(gap / error, MANY):,.3g}"


def n_parameters(model: GaussianMixture) -> int:
    """Return the number of free parameters."""
    return free_parameters(model.parameters_.structure, *model.means_.shape)


def warnings_of(subject: Subject) -> list[str]:
    """Return what a reader should know before trusting the fit; empty where there is nothing."""
    model, rows = subject.model, subject.rows
    found = [*_of_the_end(subject), *subject.notes, *model.history_.notes]
    parameters = model.parameters_
    d = parameters.n_features
    own = parameters.weights * rows
    small = np.flatnonzero(own < ROWS_PER_FEATURE * (d + 1)) if rows else np.empty(0, dtype=np.intp)
    if len(small):
        said = ", ".join(f"{k} ({own[k]:.3g} rows)" for k in small[:MOST_NAMED])
        found.append(
            f"{_counted(len(small), 'component')} with very few rows for {d:,} features: {said}"
            f"{_more(len(small))}. Covariances of so few rows are uncertain; fewer components or a simpler "
            "covariance type may be better."
        )
    variances = parameters.structure.variances(parameters.covariances, *parameters.means.shape)
    at_floor = np.flatnonzero((variances < FLOOR * model.reg_covar).any(axis=1)) if model.reg_covar else ()
    if len(at_floor):
        said = ", ".join(str(k) for k in at_floor[:MOST_NAMED])
        found.append(
            f"{_counted(len(at_floor), 'component')} with a variance that is hardly more than reg_covar = "
            f"{model.reg_covar:g}: {said}{_more(len(at_floor))}. Rows there are nearly equal in a feature; "
            "reg_covar, not the data, decides on the variance."
        )
    return list(dict.fromkeys(found))


def _of_the_end(subject: Subject) -> list[str]:
    model = subject.model
    if not subject.finished:
        return ["The run has not ended."]
    if model.stop_reason_ != "max-iter":
        return []
    change = model.history_.last_change
    last = f" The bound last changed by {change:.2g} nats per row." if math.isfinite(change) else ""
    return [f"The fit reached max_iter = {model.max_iter:,} before it converged.{last}"]


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _more(count: int) -> str:
    return f" and {count - MOST_NAMED:,} more" if count > MOST_NAMED else ""
