"""Parquet files as addressable sources: one chunk for each row group.

Needs pyarrow, the ``[parquet]`` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError, InvalidDtypeError
from emtau_dask.storage.sources import RangeSource

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["is_parquet", "open_parquet"]


@dataclass(frozen=True)
class RowGroup:
    """One row group of one file."""

    path: str
    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class ParquetReader:
    """Reads rows from the row groups that hold them; a null is NaN, whatever the column's type."""

    groups: tuple[RowGroup, ...]
    columns: tuple[str, ...]
    dtype: np.dtype[Any]
    squeeze: bool

    def read(self, start: int, stop: int) -> tuple[NDArray[Any], int]:
        """Return the rows; the bytes are the compressed sizes of the column chunks read."""
        import pyarrow.parquet as pq

        parts: list[NDArray[Any]] = []
        stored = 0
        for group in self.groups:
            if group.stop <= start or group.start >= stop:
                continue
            with pq.ParquetFile(group.path) as file:
                table = file.read_row_group(group.number, columns=list(self.columns))
                stored += _stored_bytes(file.metadata.row_group(group.number), self.columns)
            nulls = any(table.column(name).null_count for name in self.columns)
            dtype = np.dtype(np.float64) if nulls else self.dtype
            rows = np.empty((table.num_rows, len(self.columns)), dtype=dtype)
            for j, column in enumerate(self.columns):
                rows[:, j] = table.column(column).to_numpy()
            parts.append(rows[max(start - group.start, 0) : stop - group.start])
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.empty((0, len(self.columns)))])
        return (whole[:, 0] if self.squeeze else whole), stored


def _stored_bytes(metadata: Any, columns: Sequence[str]) -> int:
    wanted = set(columns)
    chunks = [metadata.column(j) for j in range(metadata.num_columns)]
    return sum(c.total_compressed_size for c in chunks if c.path_in_schema in wanted)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidDataError(
            "reading parquet needs pyarrow; install it with: pip install 'emtau_dask[parquet]'"
        ) from error
    return pyarrow


def _column_dtype(field: pa.Field, path: str) -> np.dtype[Any]:
    pa = _pyarrow()
    kind = field.type
    if not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise InvalidDtypeError(
            f"column {field.name!r} of {path} holds {kind}, not real numbers. Choose the numeric columns "
            "(data.columns in a config), or convert it."
        )
    dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    return dtype


def is_parquet(path: str) -> bool:
    """Return whether ``path`` is a parquet file, or a folder that holds any at any depth."""
    place = Path(path)
    return place.suffix in (".parquet", ".pq") or (
        place.is_dir() and not (place / "zarr.json").exists() and any(place.rglob("*.parquet"))
    )


def open_parquet(path: str, columns: Sequence[str] | None, *, squeeze: bool = False) -> RangeSource:
    """Open a parquet file, or all parquet files of a folder in name order, as a source.

    Parameters
    ----------
    path : str
    columns : sequence of str or None
        Features in this order; by default all columns, as the first file has them.
    squeeze : bool, default=False
        Give the single column as shape (n,), for weights.

    Raises
    ------
    InvalidDataError
        Nothing readable is there, pyarrow is missing, or columns differ between files.
    InvalidDtypeError
        A column does not hold real numbers.
    """
    pa = _pyarrow()
    pq = pa.parquet
    root = Path(path)
    files = sorted(root.rglob("*.parquet")) if root.is_dir() else [root]
    if not files:
        raise InvalidDataError(f"the folder {path} holds no file named *.parquet.")
    groups: list[RowGroup] = []
    chosen: tuple[str, ...] = tuple(columns or ())
    dtypes: list[np.dtype[Any]] = []
    end = 0
    for file in files:
        try:
            with pq.ParquetFile(file) as opened:
                schema, metadata = opened.schema_arrow, opened.metadata
        except (pa.ArrowInvalid, OSError) as error:
            raise InvalidDataError(f"{file} cannot be read as parquet: {error}") from error
        chosen = chosen or tuple(schema.names)
        missing = [name for name in chosen if name not in schema.names]
        if missing:
            raise InvalidDataError(
                f"{file} has no column {missing[0]!r}; its columns are {', '.join(schema.names)}."
            )
        dtypes += [_column_dtype(schema.field(name), str(file)) for name in chosen]
        for number in range(metadata.num_row_groups):
            start, end = end, end + metadata.row_group(number).num_rows
            groups.append(RowGroup(str(file.absolute()), number, start, end))
    if squeeze and len(chosen) != 1:
        raise InvalidDataError(f"{path}: one column is wanted, but {len(chosen)} are named: {chosen}.")
    dtype = np.result_type(*dtypes)
    reader = ParquetReader(tuple(groups), chosen, dtype, squeeze)
    shape = (end,) if squeeze else (end, len(chosen))
    rows = tuple(group.stop - group.start for group in groups)
    return RangeSource(reader, shape, dtype, rows, None if squeeze else chosen)
