"""What a fit reads: its rows, and what is read beside them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from emtau_dask.checkpoint import SourceEntry, fingerprint
from emtau_dask.cluster import resident, shared_source
from emtau_dask.em import FitObserver, check_counts, worth_compiling
from emtau_dask.estimator.inputs import fit_source, row_values_source
from emtau_dask.init import check_responsibilities_shape
from emtau_dask.io.sources import Source


@dataclass(frozen=True)
class FitSources:
    """What a fit reads.

    Attributes
    ----------
    rows : Source
    weights, responsibilities : Source or None
        In the chunks of the rows.
    compiled : bool
        Whether the fit goes by compiled tiles where it can: decided once for it.
    """

    rows: Source
    weights: Source | None
    responsibilities: Source | None
    compiled: bool

    def named(self) -> dict[str, Source]:
        """Return those that there are, by what users call them."""
        values = {
            "X": self.rows,
            "sample_weight": self.weights,
            "responsibilities_init": self.responsibilities,
        }
        return {name: source for name, source in values.items() if source is not None}

    def entries(self, observer: FitObserver) -> dict[str, SourceEntry | None]:
        """Return their fingerprints, as a manifest has them; reads samples."""
        found = {name: fingerprint(source, name, observer) for name, source in self.named().items()}
        return {
            "data": found["X"],
            "sample_weight": found.get("sample_weight"),
            "responsibilities_init": found.get("responsibilities_init"),
        }


@contextmanager
def opened_sources(
    estimator: Any, X: Any, sample_weight: Any, responsibilities_init: Any
) -> Iterator[FitSources]:
    """Open what a fit reads; what of it lies in memory is on the workers of a cluster until the end."""
    rows = fit_source(estimator, X)
    weights = row_values_source(sample_weight, ndim=1, what="sample_weight")
    responsibilities = row_values_source(responsibilities_init, ndim=2, what="responsibilities_init")
    check_responsibilities_shape(responsibilities, rows, estimator.n_components)
    check_counts(rows, weights, estimator.n_components)
    compiled = worth_compiling(rows.shape, estimator.covariance_type, int(estimator.n_components))
    with (
        resident(shared_source(rows, "X")) as kept_rows,
        resident(_beside(rows, weights, "sample_weight")) as kept_weights,
        resident(_beside(rows, responsibilities, "responsibilities_init")) as kept_responsibilities,
    ):
        yield FitSources(kept_rows, kept_weights, kept_responsibilities, compiled)


def _beside(rows: Source, values: Source | None, name: str) -> Source | None:
    """Return values of the rows in their chunks, shared as they are; None stays None."""
    return None if values is None else shared_source(values.aligned(rows.chunk_rows), name)
