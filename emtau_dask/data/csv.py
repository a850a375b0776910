"""CSV tables as addressable sources: read once into a scratch file of float64, from which chunks are read.

Parsing is pyarrow's, of the extra ``[parquet]``.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

import numpy as np
from dask.utils import format_bytes
from numpy.typing import NDArray

from emtau_dask.dask_config import scratch_place
from emtau_dask.data.npy import NpyHeader, NpyReader
from emtau_dask.data.parquet import check_names, check_single, not_numbers_text
from emtau_dask.data.parquet_files import arrow_input
from emtau_dask.data.source import RangeSource, even_chunks
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, StorageError, cause_of, short, warn_user
from emtau_dask.storage.errors import read_errors, writing_errors
from emtau_dask.storage.files import ScratchFolder, check_regular, read_regular
from emtau_dask.storage.locations import Place, paths_at, place_text
from emtau_dask.storage.tables import DELIMITERS, loaded_pyarrow
from emtau_dask.storage.urls import Url, is_url, suffix_of

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 2**20
"""Size of the text that is parsed at a time, and maximum size of a row (bytes). pyarrow reads up to 32 blocks
ahead."""
DOUBLE = np.dtype(np.float64)
MAX_COMPARED_LINES = 100
"""Maximum number of lines that are compared with a first line of whole numbers, which may be names."""


class ReadObserver(Protocol):
    """Is notified of how much of a table has been read."""

    def stage(self, name: str, chunks: int) -> None:
        """Begin a stage of about ``chunks`` chunks."""

    def chunks_done(self, count: int) -> None:
        """Add ``count`` chunks to those that have been read."""


@dataclass(frozen=True)
class CsvTable:
    """A table of ``size`` bytes, at an absolute path or a URL, whose first line holds ``fields``.

    The fields name the columns if ``named``. ``n_lines`` is an estimate from the beginning of the table.
    """

    place: str | Url
    size: int
    delimiter: str
    fields: list[str]
    named: bool
    n_lines: float

    @classmethod
    def at(cls, path: str, known: Sequence[str] = ()) -> CsvTable:
        """Read the beginning of a table; raises `InvalidDataError` if there is none.

        A first line that holds all ``known`` names (given by the user, or those of another table) names the
        columns.
        """
        place: str | Url = Url.of(path) if is_url(path) else str(Path(path).absolute())
        delimiter = DELIMITERS[suffix_of(path).lower()]
        with read_errors(str(place), remote=isinstance(place, Url)):
            size, beginning = _beginning(place)
            stream = io.BytesIO(beginning)
            text = (line.decode("utf-8-sig") for line in stream)
            fields = next(csv.reader(text, delimiter=delimiter), [])
        if not fields:
            raise InvalidDataError(
                f"{place} begins with an empty line, but its first line must be names of columns or a row. "
                "Remove the empty line."
            )
        if len(fields) == 1 and ";" in fields[0]:
            raise InvalidDataError(
                f"{place} separates values by ';'; only ',' and tabs are read. Convert it once, for example "
                "with pandas.read_csv(path, sep=';', decimal=',').to_parquet('rows.parquet')."
            )
        n_lines = size * (beginning.count(b"\n") + 1) / len(beginning)
        named = (len(known) > 0 and set(known) <= set(fields)) or not all(map(_is_number, fields))
        if not named:
            below = (line.decode("utf-8", "replace") for line in islice(stream, MAX_COMPARED_LINES))
            named = _are_names(fields, csv.reader(below, delimiter=delimiter), str(place))
        return cls(place, size, delimiter, fields, named, n_lines)

    def default_names(self) -> list[str] | None:
        """Return the names of the columns, without that of an index of pandas; None if they have no names.

        The index has an empty name. Warns of an index, and of names that are whole numbers.
        """
        if not self.named:
            return None
        if all(map(_is_number, self.fields)):
            warn_user(
                f"the first line of {self.place} holds whole numbers ({short(','.join(self.fields))}), and "
                "the lines below do not: it is read as the header that names the columns."
            )
        if self.fields[0]:
            return self.fields
        warn_user(
            f"the first column of {self.place} has no name: it is the index of a DataFrame, and is left out."
        )
        return self.fields[1:]

    def chosen(self, names: Sequence[str] | None) -> list[int]:
        """Return the numbers of the columns; raises `InvalidDataError` if one of the names does not exist."""
        if not self.named and names is not None:
            raise InvalidDataError(
                f"{self.place} has no names of columns in its first line; remove columns, or add that line."
            )
        names = self.default_names() if names is None else names
        if names is None:
            return list(range(len(self.fields)))
        check_names(self.fields, names, str(self.place))
        return [self.fields.index(name) for name in names]

    def blocks(self, columns: Sequence[int]) -> Iterator[NDArray[np.float64]]:
        """Yield the rows from first to last, NaN if a value is empty; raises as `open_csv`."""
        for batch in self.batches(columns, loaded_pyarrow().float64()):
            yield np.column_stack([values.to_numpy(zero_copy_only=False) for values in batch.columns])

    def batches(self, columns: Sequence[int], kind: pa.DataType) -> Iterator[pa.RecordBatch]:
        """Yield these columns, of values of a type, from the first row to the last; raises as `open_csv`."""
        pa = loaded_pyarrow()
        from pyarrow import csv as pa_csv

        names = [str(column) for column in range(len(self.fields))]
        wanted = [names[column] for column in columns]
        with read_errors(str(self.place), remote=isinstance(self.place, Url)):
            try:
                with arrow_input(self.place, self.size) as source:
                    yield from pa_csv.open_csv(
                        source,
                        pa_csv.ReadOptions(
                            column_names=names, skip_rows_after_names=int(self.named), block_size=BLOCK_BYTES
                        ),
                        pa_csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
                        pa_csv.ConvertOptions(
                            column_types=dict.fromkeys(wanted, kind), include_columns=wanted
                        ),
                    )
            except pa.ArrowInvalid as error:
                raise self._parse_error(str(error), columns) from cause_of(error)

    def _parse_error(self, message: str, columns: Sequence[int]) -> InvalidDataError:
        """Return the error for a message of pyarrow about these columns."""
        if "invalid UTF8" in message:
            return InvalidDataError(
                f"{self.place} is not in UTF-8 ({message}). Convert it once, for example with: "
                "iconv -f LATIN1 -t UTF-8"
            )
        found = re.search(r"column #(\d+): .*invalid value '(.*)'", message, re.DOTALL)
        if found is None:
            return InvalidDataError(
                f"{self.place} is not a table of {len(self.fields)} columns with rows of at most "
                f"{BLOCK_BYTES:,} bytes: {message}. Correct or convert it."
            )
        text = f"text ({short(found[2])})"
        if not self.named:
            return InvalidDtypeError(
                f"column number {found[1]} of {self.place} holds {text}, not real numbers. Convert it, or "
                "put a line of names above it and choose the numeric columns (columns=, --columns)."
            )
        others = {int(found[1]), *self._text_columns()}
        texts, numbers = ([self.fields[j] for j in columns if (j in others) == of] for of in (True, False))
        return InvalidDtypeError(not_numbers_text(str(self.place), texts, numbers, text))

    def _text_columns(self) -> set[int]:
        """Return the numbers of columns that hold text in the first rows."""
        from pyarrow import csv as pa_csv

        nulls = set(pa_csv.ConvertOptions().null_values)
        lines = (line.decode("utf-8", "replace") for line in _beginning(self.place)[1].splitlines())
        rows = islice(csv.reader(lines, delimiter=self.delimiter), 1, MAX_COMPARED_LINES)
        with suppress(csv.Error):
            values = [(j, value) for row in rows for j, value in enumerate(row) if value not in nulls]
            return {j for j, value in values if not _is_number(value)}
        return set()


@dataclass(frozen=True)
class CsvRows(NpyReader):
    """Reads rows of CSV tables from their scratch file; ``tables`` is the name of the tables in messages.

    The file is removed with the reader that `open_csv` returns, not with copies in other processes.
    """

    tables: str

    def identity(self) -> str:
        """Return the size of the file and the shape of the rows."""
        if not Path(self.path).exists():
            raise InvalidDataError(
                f"the rows of {self.tables} were read into {self.path}, which this process cannot see. Set "
                "dask's emtau.scratch to a folder that every worker sees under the same path."
            )
        return f"CSV, {super().identity()}"


def is_csv(place: Place) -> bool:
    """Return whether all files of a place end in ``.csv`` or ``.tsv`` (with tabs); see `paths_at`.

    Raises `InvalidDataError` if one cannot be accessed.
    """
    with read_errors(place_text(place), remote=False):
        return all(
            suffix_of(path).lower() in DELIMITERS and (is_url(path) or not Path(path).is_dir())
            for path in paths_at(place)
        )


def _beginning(place: str | Url) -> tuple[int, bytes]:
    """Return the size of a file, and its first bytes."""
    if isinstance(place, Url):
        size = place.size_in(place.info())
        return size, place.read_range(0, min(size, BLOCK_BYTES))
    return check_regular(place), read_regular(place, 0, BLOCK_BYTES).tobytes()


def _are_names(fields: Sequence[str], lines: Iterator[list[str]], place: str) -> bool:
    """Return whether whole numbers in the first line are names: every column below it has fractions.

    Raises `InvalidDataError` if the first line may be a row or names: if some columns have fractions and
    others do not, or if it is 0,1,2,… as pandas names columns by default.
    """
    first = [field.strip() for field in fields]
    if not all(map(str.isdecimal, first)) or len(set(first)) < len(first):
        return False
    rows = []
    with suppress(csv.Error):
        rows += [row for row in lines if len(row) == len(first)]
    has_fractions = [any(map(_is_fraction, column)) for column in zip(*rows, strict=True)]
    if len(first) > 1 and has_fractions and all(has_fractions):
        return True
    by_default = first == [str(number) for number in range(len(first))]
    if (len(first) > 1 and any(has_fractions)) or (
        by_default and has_fractions and (len(first) > 1 or all(has_fractions))
    ):
        raise InvalidDataError(
            f"the first line of {place} is {short(','.join(fields))}. It may be a row, or the names that "
            "pandas writes for columns without names. If these are names, give them (columns=, --columns), "
            "or write names with letters. If it is a row, put a line of names above it."
        )
    return False


def _is_fraction(value: str) -> bool:
    """Return whether a value is a number that is not written as a whole one."""
    bare = value.strip()
    is_nan = bare.lower() == "nan"
    return _is_number(bare) and not is_nan and not bare.lstrip("+-").isdecimal()


def tables_at(place: Place, columns: Sequence[str] | None) -> list[CsvTable]:
    """Read the beginnings of the tables of a place; ``columns`` and errors are those of `open_csv`."""
    first, *others = paths_at(place)
    tables = [CsvTable.at(first, () if columns is None else columns)]
    return tables + [CsvTable.at(path, tables[0].fields if columns is None else columns) for path in others]


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def open_csv(
    place: Place,
    columns: Sequence[str] | None,
    *,
    squeeze: bool = False,
    observer: ReadObserver | None = None,
) -> RangeSource:
    """Open CSV tables as a source of float64, in chunks of at most 16 MiB; reads them once.

    Parameters
    ----------
    place : str or sequence of str
        See `paths_at`.
    columns : sequence of str or None
        Features in this order. By default all columns in the order of the first table, without a first column
        that has an empty name: it is an index of pandas. Columns have no names if the first line is a row.
    squeeze : bool, default=False
        Give the single column as shape (n,), for weights.
    observer : ReadObserver, optional

    Raises
    ------
    InvalidDataError
        A table cannot be read, has no such columns, or begins with a line that may be a header or a row; or
        pyarrow is missing.
    InvalidDtypeError
        A column does not hold numbers.
    StorageError
        The scratch file cannot be written, or would not fit.

    Warns
    -----
    UserWarning
        An index is left out, or whole numbers are read as names.
    """
    loaded_pyarrow()
    tables = tables_at(place, columns)
    names = tables[0].default_names() if columns is None else list(columns)
    chosen = [table.chosen(names) for table in tables]
    width, where = len(chosen[0]), place_text([str(table.place) for table in tables])
    if squeeze:
        check_single(where, names or range(width))
    for table, numbers in zip(tables, chosen, strict=True):
        if len(numbers) != width:
            raise InvalidDataError(
                f"{table.place} and {tables[0].place} differ in their number of features, {len(numbers)} and "
                f"{width}. Give the same features in all tables."
            )
        if table.named and not tables[0].named and all(map(_is_number, table.fields)):
            raise InvalidDataError(
                f"the first line of {table.place} names its columns, but that of {tables[0].place} is a row. "
                "Give all tables a line of names, or none."
            )
    scratch = _scratch_folder(where, width * sum(table.n_lines for table in tables))
    path = scratch.path.absolute() / "rows"
    try:
        with writing_errors(f"the rows of {where}", path), path.open("xb") as file:
            counts = _write_rows(file, where, tables, chosen, observer)
    except BaseException:
        scratch.remove()
        raise
    shape = (sum(counts),) if squeeze else (sum(counts), width)
    rows = CsvRows(str(path), NpyHeader(shape, by_column=False, dtype=DOUBLE, begin=0), b"", where)
    weakref.finalize(rows, scratch.remove)
    chunks = tuple(chain(*(even_chunks(count, width * DOUBLE.itemsize, where) for count in counts)))
    return RangeSource(rows, shape, DOUBLE, chunks, None if squeeze or names is None else tuple(names))


def _scratch_folder(where: str, n_values: float) -> ScratchFolder:
    """Return a new scratch folder; raises `StorageError` if its disk has no space for ``n_values``."""
    place = scratch_place()
    with writing_errors(f"the rows of {where}", place):
        scratch = ScratchFolder("emtau-csv-", place)
        free = shutil.disk_usage(place).free
    if n_values * DOUBLE.itemsize > free:
        raise StorageError(
            f"the rows of {where} take about {format_bytes(int(n_values * DOUBLE.itemsize))} as float64, but "
            f"{place} has {format_bytes(free)} free. Free space, or set dask's emtau.scratch "
            "(DASK_EMTAU__SCRATCH=FOLDER before a command) to a folder with more."
        )
    return scratch


def _write_rows(
    file: BinaryIO,
    where: str,
    tables: Sequence[CsvTable],
    chosen: Sequence[Sequence[int]],
    observer: ReadObserver | None,
) -> list[int]:
    """Write the chosen columns of all tables, row by row; return the tables' numbers of rows."""
    if observer is not None:
        observer.stage(f"reading {where}", sum(-(-table.size // BLOCK_BYTES) for table in tables))
    counts = []
    for table, columns in zip(tables, chosen, strict=True):
        counts.append(0)
        for rows in table.blocks(columns):
            file.write(rows.data)
            counts[-1] += len(rows)
            if observer is not None:
                observer.chunks_done(1)
    return counts
