"""The rows that a picture shows: a bounded random sample, and what is said of it."""

from __future__ import annotations

from typing import Any

from sklearn.utils.validation import check_is_fitted

from emtau_dask.checks import integer
from emtau_dask.errors import InvalidDataError
from emtau_dask.estimator import DrawnRows, GaussianMixture, Seeds, drawn_rows
from emtau_dask.messages import short

MAX_ROWS = 20_000
FEW_ROWS = 1_000
"""So many are drawn as points, more by their density."""


def rows_to_show(
    estimator: GaussianMixture, X: Any, max_rows: Any, random_state: Any, sample_weight: Any, columns: Any
) -> DrawnRows:
    """Return at most ``max_rows`` rows; ``X`` may be rows that were drawn already.

    Raises `InvalidDataError` as `drawn_rows`, and where ``max_rows`` is not an integer of at least 1.
    """
    check_is_fitted(estimator)
    allowed = integer(1)
    if not allowed.holds(max_rows):
        raise InvalidDataError(f"max_rows = {short(max_rows)} must be {allowed.words}.")
    if isinstance(X, DrawnRows):
        return DrawnRows(X.rows[: int(max_rows)], X.weights[: int(max_rows)], X.total, X.imputed)
    return drawn_rows(
        estimator,
        X,
        size=int(max_rows),
        seed=Seeds(random_state).draw(),
        sample_weight=sample_weight,
        columns=columns,
    )


def counted(drawn: DrawnRows) -> str:
    """Return how many rows are shown, of how many."""
    shown = len(drawn.rows)
    imputed = f"; {drawn.imputed:.1%} of the values were missing" if drawn.imputed else ""
    if shown == drawn.total:
        return f"all {shown:,} rows{imputed}"
    return f"{shown:,} of {drawn.total:,} rows, drawn at random{imputed}"


def cells_of(rows: int) -> int:
    """Return into how many cells each axis of a plane is cut for the density of so many rows."""
    return max(24, min(72, int(rows**0.5 / 2.5)))
