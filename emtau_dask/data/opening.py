"""Opens stored rows and arrays of the user as a `Source`, and joins several sources."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import zarr
from numpy.typing import NDArray

from emtau_dask.data.csv import CsvTable, ReadObserver, is_csv, open_csv
from emtau_dask.data.dask_arrays import GraphSource, numpy_blocks_of, unchanged_zarr_array
from emtau_dask.data.npy import npy_source
from emtau_dask.data.parquet import check_stored_names, open_parquet, parquet_names
from emtau_dask.data.parquet_files import is_parquet
from emtau_dask.data.source import (
    ChunkRange,
    ChunkReader,
    Loaded,
    RangeReader,
    RangeSource,
    Source,
    Unstored,
    check_dtype,
    check_shape,
    memory_source,
)
from emtau_dask.data.zarr_arrays import array_source, open_zarr, zarr_source
from emtau_dask.errors import InvalidDataError, counted, did_you_mean, warn_user
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.locations import NPY, Place, check_readable, paths_at
from emtau_dask.storage.urls import is_url, suffix_of

MAX_BESIDE = 10_000
"""Maximum number of names of a folder among which that nearest to a wrong one is searched."""


@dataclass(frozen=True)
class JoinedRows(RangeReader):
    """Reads rows from the parts that hold them; part i ends before row ``ends[i]``."""

    parts: tuple[RangeReader, ...]
    ends: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows, of the common type of all parts; the bytes are those that the parts read."""
        read = [part.read(begin, end) for part, begin, end in self._touched(start, stop)]
        if not read:
            return Loaded(np.empty((0, *self.shape[1:]), self.dtype), 0)
        rows = read[0].values if len(read) == 1 else np.concatenate([each.values for each in read])
        # An integer column of parquet that has nulls is read as floating-point numbers.
        rows = rows.astype(np.result_type(rows.dtype, self.dtype), copy=False)
        unstored = reduce(Unstored.and_those, (each.unstored for each in read))
        return Loaded(rows, sum(each.bytes_read for each in read), unstored)

    def identity(self) -> str:
        """Return the number of the parts, and a digest of their identities and lengths."""
        identities = repr(([part.identity() for part in self.parts], self.ends))
        return f"{len(self.parts)} parts, SHA-256 {sha256(identities.encode()).hexdigest()}"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds: those of all parts, and the rows twice."""
        touched = [part.peak_bytes(begin, end) for part, begin, end in self._touched(start, stop)]
        row_bytes = max(8, self.dtype.itemsize) * int(np.prod(self.shape[1:]))
        return sum(touched) + 2 * (stop - start) * row_bytes

    def _touched(self, start: int, stop: int) -> Iterator[tuple[RangeReader, int, int]]:
        """Yield each part that has some of the rows, with the begin and end of these in the part."""
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
        Their numbers of features differ, or the names of these.
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
    chosen = f"{len(places):,} places, {places[0]} to {places[-1]}"
    return RangeSource(JoinedRows(parts, ends, shape, dtype), shape, dtype, chunk_rows, named, chosen)


def _width(source: RangeSource) -> str:
    return counted(source.shape[1], "feature") if len(source.shape) == 2 else f"the shape {source.shape[1:]}"


def open_source(
    place: Place,
    *,
    array: str | None = None,
    columns: Sequence[str] | None = None,
    observer: ReadObserver | None = None,
) -> Source:
    """Open stored rows by path or URL.

    Parameters
    ----------
    place : str or sequence of str
        A zarr array or group, a ``.npy`` file, a parquet file or folder, or a CSV table, as a local
        path or an fsspec URL such as ``s3://bucket/rows.zarr``. A pattern or a list gives the rows of several
        in that order; see `paths_at`.
    array : str, optional
        The member of zarr groups.
    columns : sequence of str, optional
        Columns of parquet or CSV that are the features; by default all but the index of a DataFrame.
    observer : ReadObserver, optional
        Is notified of how much of a CSV table has been read.

    Returns
    -------
    Source
        Only metadata have been read; of CSV, all rows.

    Raises
    ------
    InvalidDataError
        Nothing is there, it has another format, it cannot be read, or the features of several differ.
    """
    paths = paths_at(place)
    for path in paths:
        with read_errors(path, remote=False):
            if not is_url(path) and not Path(path).exists():
                raise InvalidDataError(
                    f"{path} does not exist.{_nearest_beside(path)} Give a zarr array or group, a .npy, "
                    "a parquet, a CSV or a netCDF file."
                )
    if len(paths) == 1:
        return _open_one(paths[0], array, columns, observer)
    if is_parquet(paths):
        return open_parquet(paths, columns)
    if is_csv(paths):
        return open_csv(paths, columns, observer=observer)
    return joined([_open_one(path, array, columns, observer) for path in paths], paths)


def _nearest_beside(path: str) -> str:
    """Return a sentence that names what is nearest to a name in its folder; "" if nothing is near."""
    wrong, names = Path(path), []
    with suppress(OSError):
        names += [each.name for each in islice(wrong.parent.iterdir(), MAX_BESIDE)]
    return did_you_mean(wrong.name, names)


def _open_one(
    path: str, array: str | None, columns: Sequence[str] | None, observer: ReadObserver | None
) -> RangeSource:
    if is_parquet(path):
        return open_parquet(path, columns)
    if is_csv(path):
        return open_csv(path, columns, observer=observer)
    if columns is not None:
        raise InvalidDataError(f"{path}: columns can be chosen for parquet and CSV only; remove columns.")
    if suffix_of(path) in NPY.endings:
        return npy_source(path)
    check_readable(path, array)
    return open_zarr(path, array)


def has_columns(place: Place) -> bool:
    """Return whether all files of a place are parquet or CSV, whose columns may have names."""
    return all(is_parquet(path) or is_csv(path) for path in paths_at(place))


def columns_of_fit(place: Place, names: Sequence[str] | None) -> Sequence[str] | None:
    """Return the ``names`` of a fit's features if the columns of a place have names, else None."""
    if names is None or not has_columns(place):
        return None
    unnamed = any(is_csv(path) and not CsvTable.at(path, names).named for path in paths_at(place))
    return None if unnamed else names


def column_names(place: Place) -> tuple[str, ...]:
    """Return the columns of a place that are features by default; () if they have no names.

    Warns and raises as `open_source`.
    """
    first = paths_at(place)[0]
    return tuple(CsvTable.at(first).default_names() or ()) if is_csv(first) else parquet_names(first)


def check_columns(place: Place, columns: Sequence[str]) -> None:
    """Raise `InvalidDataError` if the first of local tables lacks one of the columns; other data pass."""
    first = paths_at(place)[0]
    if not Path(first).exists():
        return
    if is_csv(first):
        CsvTable.at(first, columns).chosen(columns)
    elif is_parquet(first):
        check_stored_names(first, columns)


def open_column(place: Place, name: str | None, observer: ReadObserver | None = None) -> RangeSource:
    """Open one column of parquet or CSV, by default the only one, as a source of shape (n,).

    Raises as `open_source`.
    """
    paths, columns = paths_at(place), None if name is None else [name]
    if is_parquet(paths):
        return open_parquet(paths, columns, squeeze=True)
    if is_csv(paths):
        return open_csv(paths, columns, squeeze=True, observer=observer)
    return joined([open_column(path, name, observer) for path in paths], paths)


def is_lazy(data: object) -> bool:
    """Return whether ``data`` is chunked (a dask or zarr array or a source), not an array in memory."""
    return isinstance(data, (da.Array, zarr.Array, RangeSource, GraphSource))


def unlabelled(data: Any) -> Any:
    """Return the dask array in an xarray DataArray; anything else as it is, also a DataArray in memory."""
    xarray = sys.modules.get("xarray")  # Data of it exist only if it has been imported.
    if xarray is None or not isinstance(data, xarray.DataArray) or data.chunks is None:
        return data
    return data.data


def as_source(data: Any, *, ndim: int, what: str) -> Source:
    """Check the axes and the dtype of ``data``, and return it as a source.

    Parameters
    ----------
    data : Source, dask array, zarr array or ndarray
    ndim : int
        1 (a value for each row) or 2 (rows x features).
    what : str
        Its name in error messages.

    Raises
    ------
    InvalidDataError
        Wrong number of axes, or no feature.
    InvalidDtypeError
        Not real numbers.

    Warns
    -----
    UserWarning
        The dask array has unknown chunk sizes, which are computed on a copy.
    """
    if isinstance(data, da.Array):
        check_shape(data.shape, ndim, what)
        check_dtype(data.dtype, what)
        if np.isnan(data.shape).any():
            warn_user(
                f"{what} has unknown chunk sizes; they are computed now, on a copy, which costs one pass "
                f"over it. To avoid that call {what}.compute_chunk_sizes() once, or give "
                "frame.to_dask_array(lengths=True) in place of a dask DataFrame."
            )
            data = data.copy().compute_chunk_sizes()
        stored = unchanged_zarr_array(data)
        if stored is not None:
            return zarr_source(stored, data.chunks[0])
        return numpy_blocks_of(data) or GraphSource(data)
    if isinstance(data, (RangeSource, GraphSource)):
        source: Source = data
    elif isinstance(data, zarr.Array):
        check_dtype(np.dtype(data.dtype), what)
        source = array_source(data)
    else:
        array = np.asarray(data)
        check_shape(array.shape, ndim, what)
        source = memory_source(array)
    check_shape(source.shape, ndim, what)
    check_dtype(source.dtype, what)
    return source


def _load_block(reader: ChunkReader, block_info: Any = None) -> NDArray[Any]:
    here = block_info[None]
    loaded = reader.load(ChunkRange(here["chunk-location"][0], *here["array-location"][0]), [])
    return np.asarray(loaded.values)


def as_dask(data: Any) -> da.Array:
    """Return a source, zarr array or dask array as a lazy dask array of its shape, dtype and chunks."""
    if isinstance(data, da.Array):
        return data
    if isinstance(data, zarr.Array):
        data = array_source(data)
    if isinstance(data, GraphSource):
        return data.array
    chunks = (data.chunk_rows or (0,), *((size,) for size in data.shape[1:]))
    meta = np.empty((0,) * len(data.shape), data.dtype)
    return da.map_blocks(_load_block, data.reader(), chunks=chunks, dtype=data.dtype, meta=meta)
