"""The sources of a fit: its rows, and what is read beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from emtau_dask.cluster import resident, shared_source
from emtau_dask.em import check_counts
from emtau_dask.fit import FitSources
from emtau_dask.init import check_responsibilities_shape
from emtau_dask.inputs.rows import fit_source, row_values_source
from emtau_dask.io.sources import Source


@contextmanager
def opened_sources(
    client: Any, estimator: Any, X: Any, sample_weight: Any, responsibilities_init: Any
) -> Iterator[FitSources]:
    """Open what a fit reads; arrays in memory lie on the workers of a client until the block ends."""
    rows = fit_source(estimator, X)
    weights = row_values_source(sample_weight, ndim=1, what="sample_weight")
    responsibilities = row_values_source(responsibilities_init, ndim=2, what="responsibilities_init")
    check_responsibilities_shape(responsibilities, rows, estimator.n_components)
    check_counts(rows, weights, estimator.n_components)

    def beside(values: Source | None, name: str) -> Source | None:
        """Return values in the chunks of the rows, and shared as the rows are; None stays None."""
        return None if values is None else shared_source(client, values.aligned(rows.chunk_rows), name)

    with (
        resident(client, shared_source(client, rows, "X")) as kept_rows,
        resident(client, beside(weights, "sample_weight")) as kept_weights,
        resident(client, beside(responsibilities, "responsibilities_init")) as kept_responsibilities,
    ):
        yield FitSources(kept_rows, kept_weights, kept_responsibilities)
