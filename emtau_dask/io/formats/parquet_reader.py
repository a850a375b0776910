"""Rows of parquet files, read by row groups. It needs pyarrow, the extra ``[parquet]``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.files import check_regular, each
from emtau_dask.io.formats.base import Loaded, RangeReader
from emtau_dask.io.formats.parquet_footer import StoredGroup, row_groups_of
from emtau_dask.io.remote import Url, opened_stream, read_errors

if TYPE_CHECKING:
    import pyarrow as pa

SLACK, SLACK_BYTES = 1.05, 2**24
"""For what arrow's allocator keeps, and for pages."""


def loaded_pyarrow() -> Any:
    """Return pyarrow with its parquet module; raises `InvalidDataError` where it is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidDataError(
            "reading parquet needs pyarrow; install it with: pip install 'emtau_dask[parquet]'"
        ) from error
    return pyarrow


@dataclass(frozen=True)
class ParquetPart:
    """One parquet file of ``size`` bytes, at an absolute path or behind a URL."""

    place: str | Url
    size: int

    @property
    def remote(self) -> bool:
        """Whether it is behind a URL."""
        return isinstance(self.place, Url)

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file with pyarrow; any error, here or in the block, becomes an `InvalidDataError`."""
        pq = loaded_pyarrow().parquet
        with read_errors(f"the parquet file {self.place}", remote=self.remote):
            source = opened_stream(self.place, self.size) if isinstance(self.place, Url) else self.place
            with pq.ParquetFile(source, pre_buffer=self.remote) as file:
                yield file

    def footer(self) -> tuple[pa.Schema, list[StoredGroup]]:
        """Return the file's schema and its row groups; raises `InvalidDataError` if it is no parquet file."""
        pq = loaded_pyarrow().parquet
        with read_errors(f"the parquet file {self.place}", remote=self.remote), self._stream() as stream:
            groups = row_groups_of(stream, self.size)
            with pq.ParquetFile(stream) as file:
                n_columns = file.metadata.num_columns
                if any(len(group.columns) != n_columns for group in groups):
                    raise ValueError(f"not every row group has the schema's {n_columns} columns")
                return file.schema_arrow, groups

    def _stream(self) -> BinaryIO:
        if isinstance(self.place, Url):
            return opened_stream(self.place, self.size)
        return Path(self.place).open("rb")


@dataclass(frozen=True)
class RowGroup:
    """Row group ``number`` of file ``part``, with rows ``start`` to ``stop``.

    The columns that are read have ``stored`` compressed bytes, and may hold nulls if ``nulls``.
    """

    part: int
    number: int
    start: int
    stop: int
    stored: int
    nulls: bool


@dataclass(frozen=True)
class ParquetReader(RangeReader):
    """Reads rows from the row groups that hold them; a null is NaN, whatever the column's type.

    ``dtype`` is that of rows without nulls, ``decoded`` the bytes of a row as pyarrow holds it. With
    ``squeeze``, rows of the single column have shape (n,).
    """

    parts: tuple[ParquetPart, ...]
    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
    decoded: int
    squeeze: bool

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows; the bytes are the compressed sizes of the column chunks read."""
        rows: NDArray[Any] | None = None
        touched = self._touched(start, stop)
        for group in touched:
            with self.parts[group.part].opened() as file:
                table = file.read_row_group(group.number, columns=list(self.columns))
                if table.num_rows != group.stop - group.start:
                    raise ValueError(f"row group {group.number} has {table.num_rows} rows now")
                if rows is None:  # Only now is it known that the file has as many rows as it declares.
                    rows = self._room(start, stop)
                rows = self._filled(rows, start, group, table)
        if rows is None:
            rows = self._room(start, stop)
        return Loaded(rows[:, 0] if self.squeeze else rows, sum(group.stored for group in touched))

    def _room(self, start: int, stop: int) -> NDArray[Any]:
        return np.empty((stop - start, len(self.columns)), dtype=self.dtype)

    def _filled(self, rows: NDArray[Any], start: int, group: RowGroup, table: pa.Table) -> NDArray[Any]:
        """Return ``rows``, which begin at ``start``, with those of a group filled in."""
        if any(table.column(name).null_count for name in self.columns):
            rows = rows.astype(np.float64, copy=False)
        inside = slice(max(start - group.start, 0), start + len(rows) - group.start)
        first = max(group.start - start, 0)
        for j, name in enumerate(self.columns):
            values = table.column(name).to_numpy()[inside]
            rows[first : first + len(values), j] = values
        return rows

    def _touched(self, start: int, stop: int) -> list[RowGroup]:
        return [group for group in self.groups if group.stop > start and group.start < stop]

    def identity(self) -> str:
        """Return a digest of the files' sizes and their numbers of rows and row groups."""
        shapes = each(_shape_of, [part.place for part in self.parts])
        return f"{len(shapes)} parquet file(s), SHA-256 {sha256(repr(shapes).encode()).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds.

        That is the rows and, for one row group at a time, its stored bytes (twice from a network, also in
        pieces), its decoded rows, and the columns that are being decoded.
        """
        touched = self._touched(start, stop)
        nulls = any(group.nulls for group in touched)
        rows = (stop - start) * len(self.columns) * (8 if nulls else self.dtype.itemsize)
        side_by_side = min(len(self.columns), os.cpu_count() or 1)
        width = self.decoded * (1 + side_by_side / len(self.columns))
        groups = [
            group.stored * (1 + self.parts[group.part].remote) + (group.stop - group.start) * width
            for group in touched
        ]
        return math.ceil(SLACK * (rows + max(groups, default=0))) + SLACK_BYTES


def _shape_of(place: str | Url) -> tuple[int, int, int]:
    """Return the numbers of bytes, rows and row groups of the file that this process sees."""
    part = part_at(place)
    if part is None:
        raise InvalidDataError(f"the parquet file {place} is a folder now; open the data anew.")
    with part.opened() as file:
        return part.size, file.metadata.num_rows, file.metadata.num_row_groups


def part_at(place: str | Url) -> ParquetPart | None:
    """Return a file with the size that it has now; None where it is a folder."""
    with read_errors(f"the parquet file {place}", remote=isinstance(place, Url)):
        if not isinstance(place, Url):
            return None if Path(place).is_dir() else ParquetPart(place, check_regular(place))
        info = place.info()
        if info["type"] == "directory":
            return None
        return ParquetPart(place, place.size_in(info))
