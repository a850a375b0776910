"""Parquet files and folders as addressable sources, with one chunk for each row group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emtau_dask.errors import InvalidDataError, InvalidDtypeError, warn_user
from emtau_dask.io.files import check_regular, each, paths_below
from emtau_dask.io.formats.base import RangeSource
from emtau_dask.io.formats.parquet_footer import StoredGroup
from emtau_dask.io.formats.parquet_reader import ParquetPart, ParquetReader, RowGroup, loaded_pyarrow, part_at
from emtau_dask.io.formats.places import Place, paths_at, place_text
from emtau_dask.io.remote import Url, is_url, read_errors, suffix_of

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".pq")
ZARR_DOCUMENTS = ("zarr.json", ".zgroup", ".zarray")


def _parts(place: Place) -> list[ParquetPart]:
    """Return the files of a place, see `paths_at`, those of a folder in name order."""
    return [part for path in paths_at(place) for part in _parts_of(path)]


def _parts_of(path: str) -> list[ParquetPart]:
    """Return the file, or all files of a folder in name order; raises `InvalidDataError` for none."""
    place = Url.of(path) if is_url(path) else str(Path(path).absolute())
    one = part_at(place) if suffix_of(path) in SUFFIXES else None
    if one is not None:
        return [one]
    if isinstance(place, Url):
        with read_errors(str(place), remote=True):
            parts = [ParquetPart(place / name, size) for name, size in place.find(".parquet")]
    else:
        with read_errors(path, remote=False):
            files = sorted(_files_below(place), key=lambda file: Path(file).parts)
        parts = [ParquetPart(file, check_regular(file)) for file in files]
    if not parts:
        raise InvalidDataError(f"the folder {path} holds no file named *.parquet.")
    return parts


def _row_group(
    part: int, number: int, start: int, group: StoredGroup, columns: Sequence[str], where: str
) -> RowGroup:
    """Return a row group; raises `InvalidDataError` unless its columns have as many values as it has rows.

    pyarrow trusts the number of rows: it would read a part of a column, or of the one after it.
    """
    chunks = [chunk for chunk in group.columns if chunk.path in columns]
    for chunk in chunks:
        if chunk.n_values != group.n_rows:
            raise InvalidDataError(
                f"the parquet file {where} contradicts itself: of {group.n_rows:,} rows, its column "
                f"{chunk.path!r} has {chunk.n_values:,}. Restore it, or write it again."
            )
    nulls = any(chunk.null_count != 0 for chunk in chunks)
    stored = sum(chunk.stored for chunk in chunks)
    return RowGroup(part, number, start, start + group.n_rows, stored, nulls)


def _column_dtype(field: pa.Field, path: str) -> np.dtype[Any]:
    pa = loaded_pyarrow()
    kind = field.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise InvalidDtypeError(
            f"column {field.name!r} of {path} holds {kind}, not real numbers. Choose the numeric columns "
            "(columns=, --columns), or convert it."
        )
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def is_parquet(place: Place) -> bool:
    """Return whether all of a place is parquet: files, or folders that hold any at any depth; see `paths_at`.

    Where a suffix decides, nothing is opened. Raises `InvalidDataError` where one cannot be looked at.
    """
    return all(_is_parquet(path) for path in paths_at(place))


def _is_parquet(path: str) -> bool:
    if suffix_of(path) in SUFFIXES:
        return True
    if is_url(path) and suffix_of(path) in (".zarr", ".npy"):
        return False
    place = Url.of(path) if is_url(path) else Path(path)
    with read_errors(str(place), remote=isinstance(place, Url)):
        if any((place / name).exists() for name in ZARR_DOCUMENTS):
            return False
        if isinstance(place, Url):
            return bool(place.find(".parquet"))
        return place.is_dir() and any(_files_below(place))


def _files_below(folder: str | Path) -> Iterator[str]:
    return (path for path in paths_below(folder) if path.endswith(".parquet"))


def parquet_names(place: Place) -> tuple[str, ...]:
    """Return the columns that are features by default; warns and raises as `open_parquet`."""
    part = _parts(place)[0]
    schema, _ = part.footer()
    return _features(schema, str(part.place))


def _features(schema: pa.Schema, place: str) -> tuple[str, ...]:
    """Return the names of all columns but those that hold the index of a DataFrame; warns of these."""
    index = _index_columns(schema)
    chosen = tuple(name for name in schema.names if name not in index)
    left_out = ", ".join(repr(name) for name in schema.names if name in index)
    if left_out and not chosen:
        raise InvalidDataError(
            f"{place} has no columns but the index {left_out}. Name it in columns to use it."
        )
    if left_out:
        warn_user(
            f"the column {left_out} is the index of the DataFrame in {place}, and is left out. To keep it, "
            "name it in columns, with all others that you want."
        )
    return chosen


def _index_columns(schema: pa.Schema) -> frozenset[str]:
    """Return the columns that pandas' metadata, if there are any, name as the index of a DataFrame."""
    empty: frozenset[str] = frozenset()
    try:
        described = schema.pandas_metadata
    except (ValueError, RecursionError):  # they are no JSON
        return empty
    names = described.get("index_columns") if isinstance(described, dict) else None
    return (
        frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()
    )


def _check_names(schema: pa.Schema, chosen: Sequence[str], place: str) -> None:
    """Raise `InvalidDataError` unless the file has every chosen column once."""
    if not chosen:
        raise InvalidDataError(f"{place} has no columns.")
    found = Counter(schema.names)
    for name in chosen:
        if found[name] != 1:
            how = "no column" if not found[name] else f"{found[name]} columns"
            raise InvalidDataError(f"{place} has {how} {name!r}; its columns are {', '.join(schema.names)}.")


def open_parquet(place: Place, columns: Sequence[str] | None, *, squeeze: bool = False) -> RangeSource:
    """Open parquet files as a source, those of a folder in name order.

    Parameters
    ----------
    place : str or sequence of str
        See `paths_at`.
    columns : sequence of str or None
        Features in this order; by default all columns, as the first file has them, but those that pandas'
        metadata name as the index of a DataFrame.
    squeeze : bool, default=False
        Give the single column as shape (n,), for weights.

    Raises
    ------
    InvalidDataError
        Nothing readable is there, pyarrow is missing, or columns differ between files.
    InvalidDtypeError
        A column does not hold real numbers.

    Warns
    -----
    UserWarning
        An index is left out.
    """
    loaded_pyarrow()
    parts = _parts(place)
    groups: list[RowGroup] = []
    chosen: tuple[str, ...] = () if columns is None else tuple(columns)
    dtypes: list[np.dtype[Any]] = []
    end = 0
    for i, (schema, stored) in enumerate(each(ParquetPart.footer, parts)):
        where = str(parts[i].place)
        chosen = chosen or _features(schema, where)
        _check_names(schema, chosen, where)
        dtypes += [_column_dtype(schema.field(name), where) for name in chosen]
        for number, group in enumerate(stored):
            groups.append(_row_group(i, number, end, group, chosen, where))
            end = groups[-1].stop
    if squeeze and len(chosen) != 1:
        raise InvalidDataError(
            f"{place_text(place)}: one column is wanted, but {len(chosen)} are named: {chosen}."
        )
    dtype = np.result_type(*dtypes)
    decoded = len(chosen) * max(kind.itemsize for kind in dtypes)
    reader = ParquetReader(tuple(parts), tuple(groups), chosen, dtype, decoded, squeeze)
    shape = (end,) if squeeze else (end, len(chosen))
    rows = tuple(group.stop - group.start for group in groups)
    return RangeSource(reader, shape, dtype, rows, None if squeeze else chosen)
