"""Several stored sources, one after the other, as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from itertools import accumulate
from typing import Any

import numpy as np

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.formats import Loaded, RangeReader, RangeSource, Unstored


@dataclass(frozen=True)
class JoinedRows(RangeReader):
    """Reads rows from the parts that hold them; ``ends`` are the numbers of rows up to the end of each."""

    parts: tuple[RangeReader, ...]
    ends: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows, of the common type of all parts; the bytes are those that the parts read."""
        read = [part.read(begin, end) for part, begin, end in self._touched(start, stop)]
        if not read:
            return Loaded(np.empty((0, *self.shape[1:]), self.dtype), 0)
        rows = read[0].values if len(read) == 1 else np.concatenate([found.values for found in read])
        # Nulls of parquet make a column of integers one of floating-point numbers when it is read.
        rows = rows.astype(np.result_type(rows.dtype, self.dtype), copy=False)
        unstored = reduce(Unstored.and_those, (found.unstored for found in read))
        return Loaded(rows, sum(found.bytes_read for found in read), unstored)

    def identity(self) -> str:
        """Return the number of the parts, and a digest of their identities and lengths."""
        seen = repr(([part.identity() for part in self.parts], self.ends))
        return f"{len(self.parts)} parts, SHA-256 {sha256(seen.encode()).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds: those of all parts, and the rows twice."""
        touched = [part.peak_bytes(begin, end) for part, begin, end in self._touched(start, stop)]
        row_bytes = max(8, self.dtype.itemsize) * int(np.prod(self.shape[1:]))
        return sum(touched) + 2 * (stop - start) * row_bytes

    def _touched(self, start: int, stop: int) -> Iterator[tuple[RangeReader, int, int]]:
        """Yield the parts that have any of the rows, and which of theirs these are."""
        for number in range(bisect_right(self.ends, start), len(self.parts)):
            before = self.ends[number - 1] if number else 0
            begin, end = max(start, before), min(stop, self.ends[number])
            if before >= stop:
                return
            if begin < end:
                yield self.parts[number], begin - before, end - before


def joined(sources: Sequence[RangeSource], places: Sequence[str]) -> RangeSource:
    """Return stored sources as one, in the chunks of each; ``places`` are their names for messages.

    Raises
    ------
    InvalidDataError
        They have other numbers of features, or other names of these.
    """
    first = sources[0]
    for source, place in zip(sources, places, strict=True):
        if source.shape[1:] != first.shape[1:]:
            raise InvalidDataError(
                f"{place} has {_width(source)}, but {places[0]} has {_width(first)}. Files of one table must "
                "have the same features."
            )
        if None not in (source.names, first.names) and source.names != first.names:
            raise InvalidDataError(
                f"{place} has the features {source.names}, but {places[0]} has {first.names}. Choose the "
                "same columns, in the same order."
            )
    ends = tuple(accumulate(source.shape[0] for source in sources))
    shape, dtype = (ends[-1], *first.shape[1:]), np.result_type(*(source.dtype for source in sources))
    named = first.names if all(source.names == first.names for source in sources) else None
    chunk_rows = tuple(rows for source in sources for rows in source.chunk_rows)
    parts = tuple(source.ranges for source in sources)
    return RangeSource(JoinedRows(parts, ends, shape, dtype), shape, dtype, chunk_rows, named)


def _width(source: RangeSource) -> str:
    return f"{source.shape[1]} feature(s)" if len(source.shape) == 2 else f"the shape {source.shape[1:]}"
