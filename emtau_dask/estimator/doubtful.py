"""Warnings of columns that are hardly features: constant ones, ids, and those that say what others say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from emtau_dask.errors import listed, warn_user
from emtau_dask.mixture.linalg import Floats, Ints

LEAST_ROWS = 100
"""Minimum rows of a sample that says anything."""
FIRST_ROWS = 256
"""Rows that are compared first: in most columns of whole numbers some of these are equal."""
COLLINEAR = 0.999
MOST_COMPARED = 1024
"""Maximum features whose correlations are computed: the first ones."""


@dataclass
class DoubtfulColumns:
    """Warns of the columns of the first random sample that a fit draws.

    ``names`` are those of the features, where they have any, ``n_rows`` the rows of the data. ``notes`` are
    the warnings.
    """

    names: Sequence[str] | None
    n_rows: int
    notes: list[str] = field(default_factory=list)
    looked: bool = False

    def __call__(self, rows: Floats, numbers: Ints) -> None:
        """Look at rows (m, d) and their row numbers (m,)."""
        if self.looked:
            return
        self.looked = True
        if len(rows) < LEAST_ROWS or rows.shape[1] == 1:
            return
        which = "all" if len(rows) == self.n_rows else "a random sample of"
        seen = f"in {which} {len(rows):,} rows"
        constant = np.fmin.reduce(rows) == np.fmax.reduce(rows)
        alike = [int(j) for j in np.flatnonzero(~constant) if looks_like_id(rows[:, j], numbers)]
        if constant.any():
            found = self._named(np.flatnonzero(constant), "is constant", "are constant")
            it, them = ("They", "them") if constant.sum() > 1 else ("It", "it")
            self._warn(f"{found} {seen}. {it} cannot separate components: leave {them} out.")
        if alike:
            found = self._named(alike, "holds", "hold")
            self._warn(
                f"{found} whole numbers that all differ, or never fall from row to row, {seen}, like an id "
                "or a counter. A mixture takes them for measurements: leave out those that measure nothing."
            )
        pairs = [pair for pair in collinear(rows[:, :MOST_COMPARED]) if not constant[pair].any()]
        if pairs:
            found = listed(" and ".join(map(self._name, pair)) for pair in pairs)
            self._warn(
                f"{self._kind}s {found} are collinear {seen}: the magnitude of their correlation is above "
                f"{COLLINEAR}. They say the same twice: leave out one of each pair."
            )

    @property
    def _kind(self) -> str:
        return "feature" if self.names is None else "column"

    def _name(self, column: int) -> str:
        return f"{column}" if self.names is None else repr(self.names[column])

    def _named(self, columns: Iterable[int], verb: str, plural: str) -> str:
        """Return the columns, at most five of them by name, and the verb."""
        names = [self._name(j) for j in columns]
        ending, verb = ("s", plural) if len(names) > 1 else ("", verb)
        return f"{self._kind}{ending} {listed(names)} {verb}"

    def _warn(self, text: str) -> None:
        self.notes.append(text)
        warn_user(text)


def collinear(rows: Floats) -> list[list[int]]:
    """Return the columns of (m, d) that are collinear with an earlier one, each after the first of these."""
    with np.errstate(all="ignore"):
        found = np.triu(np.abs(np.corrcoef(rows, rowvar=False)) > COLLINEAR, 1)
    return [[int(found[:, j].argmax()), int(j)] for j in np.flatnonzero(found.any(axis=0))]


def looks_like_id(values: Floats, numbers: Ints) -> bool:
    """Return whether a column of a sample (m,) holds whole numbers that all differ, or that never fall.

    ``numbers`` are the row numbers. A column with two values, such as False and True, may be sorted.
    """
    if (values != np.floor(values)).any():
        return False
    first = values[:FIRST_ROWS]
    if len(np.unique(first)) == len(first) and len(np.unique(values)) == len(values):
        return True
    in_order = values[np.argsort(numbers)]
    return bool((np.diff(in_order) >= 0).all()) and len(np.unique(values)) > 2
