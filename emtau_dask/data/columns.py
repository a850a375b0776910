"""Columns of parquet and CSV that are kept as they are, of any type, beside what is computed of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from emtau_dask.data.csv import CsvTable, is_csv, tables_at
from emtau_dask.data.parquet import check_names
from emtau_dask.data.parquet_files import ParquetPart, is_parquet, partition_columns, parts_at
from emtau_dask.errors import InvalidDataError
from emtau_dask.storage.files import each
from emtau_dask.storage.locations import Place, paths_at, place_text
from emtau_dask.storage.tables import loaded_pyarrow

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 2**15
"""Maximum rows that are read from parquet at a time."""


@dataclass(frozen=True)
class _Part:
    """A file: the types of the columns, and what reads them from its first row to its last."""

    place: str
    schema: pa.Schema
    read: Callable[[], Iterator[pa.Table]]


@dataclass(frozen=True)
class KeptColumns:
    """Columns with these names and types, of files in the order in which a source reads their rows."""

    place: str
    schema: pa.Schema
    parts: tuple[_Part, ...]

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows from first to last, a few at a time; raises `InvalidDataError`."""
        for part in self.parts:
            for table in part.read():
                try:
                    table = table if table.schema == self.schema else table.cast(self.schema)
                except loaded_pyarrow().ArrowInvalid as error:
                    raise InvalidDataError(
                        f"{part.place} has a value to keep that the type which its column has in all files "
                        f"cannot hold ({error}). Convert the column to one type, or leave it out of --keep."
                    ) from error
                yield table


class RowsInOrder:
    """The rows of kept columns, taken from first to last.

    Its methods raise `InvalidDataError` where there are fewer or more rows than are taken.
    """

    def __init__(self, kept: KeptColumns) -> None:
        self._place = kept.place
        self._tables = kept.tables()
        self._rest = kept.schema.empty_table()

    def take(self, n_rows: int) -> Iterator[pa.Table]:
        """Yield the next rows, in pieces."""
        while n_rows:
            if self._is_at_end():
                raise self._changed("fewer")
            piece = self._rest.slice(0, n_rows)
            self._rest = self._rest.slice(piece.num_rows)
            n_rows -= piece.num_rows
            yield piece

    def finish(self) -> None:
        """Make sure that all rows are taken."""
        if not self._is_at_end():
            raise self._changed("more")

    def _is_at_end(self) -> bool:
        while not self._rest.num_rows:
            found = next(self._tables, None)
            if found is None:
                return True
            self._rest = found
        return False

    def _changed(self, how: str) -> InvalidDataError:
        return InvalidDataError(
            f"the columns to keep of {self._place} have {how} rows than were labelled: the data changed "
            "meanwhile. Run it again when nothing writes there."
        )


def kept_columns(place: Place, names: Sequence[str], features: Sequence[str] | None) -> KeptColumns:
    """Open columns of a place that `has_columns`; only metadata are read.

    Parameters
    ----------
    place : str or sequence of str
        See `paths_at`.
    names : sequence of str
        Columns of any type, also those that the names of folders give parquet: whole numbers of 32 bits or
        text. Values of CSV are text.
    features : sequence of str or None
        The columns that the rows are opened with: they tell whether the first line of CSV names columns.

    Raises
    ------
    InvalidDataError
        There are no such columns, or they have other types in other files.
    """
    pa = loaded_pyarrow()
    parts = tuple(_parts(place, names, features))
    schema = parts[0].schema
    for part in parts:
        try:
            schema = pa.unify_schemas([schema, part.schema], promote_options="permissive")
        except pa.ArrowTypeError as error:
            raise InvalidDataError(
                f"{part.place} has a column to keep of another type than {parts[0].place} ({error}). Convert "
                "one of them, or leave it out of --keep."
            ) from error
    return KeptColumns(place_text(place), schema, parts)


def _parts(place: Place, names: Sequence[str], features: Sequence[str] | None) -> Iterator[_Part]:
    paths = paths_at(place)
    if is_parquet(paths):
        yield from _parquet_parts(paths, names)
    elif is_csv(paths):
        yield from map(partial(_csv_part, names=names), tables_at(paths, features))
    else:
        for path in paths:
            yield from _parts(path, names, features)


def _parquet_parts(place: Place, names: Sequence[str]) -> Iterator[_Part]:
    pa = loaded_pyarrow()
    parts, _ = parts_at(place)
    footers = each(ParquetPart.footer, parts)
    of_folders = {
        name: pa.string() if dtype is None else pa.int32()
        for name, dtype in partition_columns(parts).items()
        if name not in footers[0][0].names
    }
    for part, (schema, _) in zip(parts, footers, strict=True):
        check_names([*schema.names, *of_folders], names, str(part.place))
        fields = [
            pa.field(name, of_folders[name] if name in of_folders else schema.field(name).type)
            for name in names
        ]
        yield _Part(str(part.place), pa.schema(fields), partial(_read_parquet, part, pa.schema(fields)))


def _read_parquet(part: ParquetPart, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the columns of a file; those that it does not store are the same in all rows, see `partition`."""
    pa = loaded_pyarrow()
    given = dict(part.partition)
    with part.opened() as file:
        stored = [name for name in schema.names if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=stored):
                columns = [
                    batch[field.name]
                    if field.name in stored
                    else pa.repeat(pa.scalar(given.get(field.name), pa.string()).cast(field.type), len(batch))
                    for field in schema
                ]
                yield pa.table(columns, schema=schema)


def _csv_part(table: CsvTable, names: Sequence[str]) -> _Part:
    if not table.named:
        raise InvalidDataError(
            f"{table.place} names no columns in its first line; leave out --keep, or put a line of names "
            "above."
        )
    check_names(table.fields, names, str(table.place))
    pa = loaded_pyarrow()
    schema = pa.schema([(name, pa.string()) for name in names])
    return _Part(str(table.place), schema, partial(_read_csv, table, schema))


def _read_csv(table: CsvTable, schema: pa.Schema) -> Iterator[pa.Table]:
    pa = loaded_pyarrow()
    for batch in table.batches([table.fields.index(name) for name in schema.names], pa.string()):
        yield pa.table(batch.columns, schema=schema)
