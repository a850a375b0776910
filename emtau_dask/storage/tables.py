"""Tables of results, of the format that their names end in, written piece by piece by pyarrow.

They appear at their place complete or not at all, see `publishing`.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from emtau_dask.errors import EmtauError, InvalidDataError
from emtau_dask.storage.files import opened_regular
from emtau_dask.storage.locations import CSV, PARQUET, TSV
from emtau_dask.storage.publishing import ResultKind, replacing

if TYPE_CHECKING:
    import pyarrow as pa

DELIMITERS = {**dict.fromkeys(CSV.endings, ","), **dict.fromkeys(TSV.endings, "\t")}
GROUP_ROWS, GROUP_BYTES = 2**20, 2**25
"""Rows and bytes in memory at which a row group of parquet is written."""
MAX_HEADER = 2**20
"""Maximum characters of the first line of CSV that are looked at."""
ATTRIBUTES = b"emtau"
"""Key of what parquet stores with its schema."""


def loaded_pyarrow() -> Any:
    """Return pyarrow with its parquet module; raises `InvalidDataError` where it is missing."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InvalidDataError(
            "tables of parquet and CSV need pyarrow; install it with: pip install 'emtau_dask[parquet]'"
        ) from error
    return pyarrow


def is_table(path: Path) -> bool:
    """Return whether a name ends as those of tables do."""
    return path.suffix.lower() in (*PARQUET.endings, *DELIMITERS)


def holds(path: Path, kind: pa.DataType) -> bool:
    """Return whether the table of that name can hold values of a type: CSV only those that are text."""
    pa = loaded_pyarrow()
    if path.suffix.lower() in PARQUET.endings:
        return True
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return False
    try:
        pa.array([], kind).cast(pa.large_string())
    except pa.ArrowNotImplementedError:
        return False
    return True


class Table(Protocol):
    """A table that is being written."""

    def append(self, rows: pa.Table) -> None:
        """Add rows, of the table's schema."""

    def finish(self) -> None:
        """Write what is still in memory."""

    def abandon(self) -> None:
        """Write nothing more: the file goes."""


@contextmanager
def new_table(
    path: Path, schema: pa.Schema, attributes: Mapping[str, Any], *, overwrite: bool, kind: ResultKind
) -> Iterator[Table]:
    """Yield a new table, whose name says its format; parquet stores ``attributes`` too. See `replacing`."""
    with replacing(path, overwrite=overwrite, kind=kind) as private, private.open("xb") as file:
        table: Table
        if path.suffix.lower() in PARQUET.endings:
            table = _Parquet(file, schema.with_metadata({ATTRIBUTES: json.dumps(attributes)}))
        else:
            table = _Text(file, schema, DELIMITERS[path.suffix.lower()])
        try:
            yield table
            table.finish()
        except BaseException:
            table.abandon()
            raise


class _Parquet:
    """Parquet, in row groups of at most `GROUP_ROWS`, and of about `GROUP_BYTES` if that is less."""

    def __init__(self, file: BinaryIO, schema: pa.Schema) -> None:
        self._writer = loaded_pyarrow().parquet.ParquetWriter(file, schema)
        self._pending: list[pa.Table] = []
        self._rows = self._bytes = 0

    def append(self, rows: pa.Table) -> None:
        if self._rows + rows.num_rows > GROUP_ROWS or self._bytes + rows.nbytes > GROUP_BYTES:
            self._flush()
        self._pending.append(rows)
        self._rows += rows.num_rows
        self._bytes += rows.nbytes

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        self._writer.is_open = False  # Else it would be closed when it is collected, after its file.

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(loaded_pyarrow().concat_tables(self._pending), GROUP_ROWS)
        self._pending, self._rows, self._bytes = [], 0, 0


class _Text:
    """CSV in UTF-8: text in quotes, nulls as nothing."""

    def __init__(self, file: BinaryIO, schema: pa.Schema, delimiter: str) -> None:
        pa = loaded_pyarrow()
        from pyarrow.csv import CSVWriter, WriteOptions

        def written(kind: Any) -> Any:
            numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
            return kind if numeric else pa.large_string()

        self._schema = pa.schema([(field.name, written(field.type)) for field in schema])
        self._writer = CSVWriter(file, self._schema, write_options=WriteOptions(delimiter=delimiter))

    def append(self, rows: pa.Table) -> None:
        self._writer.write_table(rows.cast(self._schema))

    def finish(self) -> None:
        self._writer.close()

    def abandon(self) -> None:
        self._writer.close()


def columns_and_attributes(path: Path) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a table's columns, and what `new_table` stored in it; ([], {}) for other things."""
    try:
        with opened_regular(path):
            pass
        if path.suffix.lower() in PARQUET.endings:
            with path.open("rb") as file:
                schema = loaded_pyarrow().parquet.read_schema(file)
            return schema.names, dict(json.loads((schema.metadata or {}).get(ATTRIBUTES, b"{}")))
        with path.open(encoding="utf-8", newline="") as text:
            first = text.readline(MAX_HEADER)
        return next(csv.reader([first], delimiter=DELIMITERS[path.suffix.lower()]), []), {}
    except (OSError, ValueError, TypeError, NotImplementedError, csv.Error, EmtauError):
        return [], {}
