"""CSV tables as addressable sources: one pass finds where chunks of lines begin, later ones are parsed.

Parsing is pyarrow's, of the extra ``[parquet]``. A line is a row, so that values with line breaks in quotes
are refused.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.parquet import loaded_pyarrow
from emtau_dask.data.source import Loaded, RangeReader, RangeSource
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, cause_of, short, warn_user
from emtau_dask.storage.errors import read_errors
from emtau_dask.storage.files import check_regular, read_regular
from emtau_dask.storage.locations import Place, paths_at
from emtau_dask.storage.urls import Url, is_url, suffix_of

DELIMITERS = {".csv": ",", ".tsv": "\t"}
CHUNK_BYTES = 2**24
"""Of text in a chunk, but for the end of its last line."""
REMEDY = "Each line is a row: correct the table, choose other columns, or convert it to parquet."
DOUBLE = np.dtype(np.float64)


@dataclass(frozen=True)
class CsvFile:
    """A file of ``size`` bytes, at an absolute path or behind a URL."""

    place: str | Url
    size: int

    @classmethod
    def at(cls, path: str) -> CsvFile:
        """Find a file; raises `InvalidDataError` where there is none."""
        if is_url(path):
            url = Url.of(path)
            with read_errors(str(url), remote=True):
                return cls(url, url.size_in(url.info()))
        with read_errors(path, remote=False):
            return cls(str(Path(path).absolute()), check_regular(path))

    def read(self, begin: int, end: int) -> bytes:
        """Return bytes ``begin`` to ``end``."""
        with read_errors(str(self.place), remote=isinstance(self.place, Url)):
            if isinstance(self.place, Url):
                return self.place.read_range(begin, end)
            found = read_regular(self.place, begin, end, end - begin).tobytes()
            if len(found) != end - begin:
                raise ValueError(f"it ends at byte {begin + len(found):,}")
            return found


@dataclass(frozen=True)
class CsvReader(RangeReader):
    """Reads rows from the chunks of lines that hold them; an empty value is NaN.

    ``begins`` are the bytes at which chunks begin, and the end of the last; ``starts`` are the numbers of
    their first rows, and of all rows. ``chosen`` are the numbers of the columns that are read, of ``width``.
    """

    file: CsvFile
    delimiter: str
    begins: tuple[int, ...]
    starts: tuple[int, ...]
    width: int
    chosen: tuple[int, ...]
    squeeze: bool

    def read(self, start: int, stop: int) -> Loaded:
        """Return the rows; the bytes are those of the text of their chunks."""
        rows = np.empty((stop - start, len(self.chosen)))
        bytes_read = 0
        for chunk in self._touched(start, stop):
            first, last = self.starts[chunk], self.starts[chunk + 1]
            values = self._parsed(chunk)[max(start, first) - first : min(stop, last) - first]
            begin = max(start, first) - start
            rows[begin : begin + len(values)] = values
            bytes_read += self.begins[chunk + 1] - self.begins[chunk]
        return Loaded(rows[:, 0] if self.squeeze else rows, bytes_read)

    def _touched(self, start: int, stop: int) -> Iterator[int]:
        chunk = bisect_right(self.starts, start) - 1
        while start < stop and self.starts[chunk] < stop:
            yield chunk
            chunk += 1

    def _parsed(self, chunk: int) -> NDArray[np.float64]:
        pa = loaded_pyarrow()
        from pyarrow import csv as pa_csv

        begin, end = self.begins[chunk : chunk + 2]
        n_rows = self.starts[chunk + 1] - self.starts[chunk]
        text = self.file.read(begin, end)
        names = [str(column) for column in range(self.width)]
        wanted = [names[column] for column in self.chosen]
        where = f"bytes {begin:,} to {end:,} of {self.file.place}"
        try:
            table = pa_csv.read_csv(
                pa.BufferReader(text),
                pa_csv.ReadOptions(column_names=names, use_threads=False, block_size=len(text) + 1),
                pa_csv.ParseOptions(delimiter=self.delimiter),
                pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(wanted, pa.float64()), include_columns=wanted
                ),
            )
        except pa.ArrowInvalid as error:
            raise InvalidDataError(
                f"{where} are no rows of {self.width} columns, those chosen of numbers ({error}). {REMEDY}"
            ) from cause_of(error)
        if table.num_rows != n_rows:
            raise InvalidDataError(
                f"{where} have {n_rows:,} lines, but {table.num_rows:,} rows: there are values with line "
                f"breaks, or empty lines. {REMEDY}"
            )
        return np.column_stack([column.to_numpy() for column in table.columns])

    def identity(self) -> str:
        """Return the file's size."""
        place = self.file.place
        return f"CSV of {CsvFile.at(place.url if isinstance(place, Url) else place).size} bytes"

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds: rows, a chunk as text and as columns."""
        width = DOUBLE.itemsize * len(self.chosen)
        chunks = [
            3 * (self.begins[chunk + 1] - self.begins[chunk])
            + 3 * width * (self.starts[chunk + 1] - self.starts[chunk])
            for chunk in self._touched(start, stop)
        ]
        return (stop - start) * width + max(chunks, default=0) + CHUNK_BYTES


def is_csv(place: Place) -> bool:
    """Return whether all of a place is CSV by its ending: ``.csv``, or ``.tsv`` with tabs; see `paths_at`.

    Raises `InvalidDataError` where one cannot be looked at.
    """
    return all(suffix_of(path).lower() in DELIMITERS and not _is_folder(path) for path in paths_at(place))


def _is_folder(path: str) -> bool:
    with read_errors(path, remote=False):
        return not is_url(path) and Path(path).is_dir()


def has_names(path: str) -> bool:
    """Return whether the first line of a CSV file names the columns: one of its values is no number."""
    return not _are_numbers(_fields(path))


def csv_names(path: str) -> tuple[str, ...] | None:
    """Return the columns that are features by default, None where they have no names."""
    fields = _fields(path)
    return None if _are_numbers(fields) else tuple(_default(fields, path))


def _fields(path: str) -> list[str]:
    return _first_line(CsvFile.at(path), DELIMITERS[suffix_of(path).lower()])[0]


def open_csv(path: str, columns: Sequence[str] | None, *, squeeze: bool = False) -> RangeSource:
    """Open a CSV table as a source of float64, in chunks of about 16 MiB of text; reads it once.

    The first line names the columns, unless all of its values are numbers: then columns have no names.

    Parameters
    ----------
    path : str
        A local path or a URL.
    columns : sequence of str or None
        Features in this order; by default all columns but one without a name, which is the index that pandas
        writes.
    squeeze : bool, default=False
        Give the single column as shape (n,), for weights.

    Raises
    ------
    InvalidDataError
        It cannot be read, has no such columns, or pyarrow is missing.
    InvalidDtypeError
        A column does not begin with a number.

    Warns
    -----
    UserWarning
        An index is left out.
    """
    loaded_pyarrow()
    file, delimiter = CsvFile.at(path), DELIMITERS[suffix_of(path).lower()]
    where = str(file.place)
    fields, after_names = _first_line(file, delimiter)
    headless = _are_numbers(fields)
    names = tuple(fields)
    if headless:
        if columns is not None:
            raise InvalidDataError(f"{where} names no columns in its first line; leave out columns.")
        chosen = tuple(range(len(fields)))
    else:
        wanted = _default(fields, where) if columns is None else list(columns)
        for name in wanted:
            if fields.count(name) != 1:
                how = "no column" if name not in fields else f"{fields.count(name)} columns"
                raise InvalidDataError(f"{where} has {how} {name!r}; its columns are {', '.join(fields)}.")
        chosen = tuple(fields.index(name) for name in wanted)
        names = tuple(wanted)
    if squeeze and len(chosen) != 1:
        raise InvalidDataError(f"{where}: one column is wanted, but {len(chosen)} are named: {names}.")
    begins, starts = _chunks(file, 0 if headless else after_names)
    reader = CsvReader(file, delimiter, begins, starts, len(fields), chosen, squeeze)
    _check_numbers(reader, where, names)
    shape = (starts[-1],) if squeeze else (starts[-1], len(chosen))
    rows = tuple(int(count) for count in np.diff(starts))
    return RangeSource(reader, shape, DOUBLE, rows, None if squeeze or headless else names)


def _first_line(file: CsvFile, delimiter: str) -> tuple[list[str], int]:
    """Return the fields of the first line, and the byte after it."""
    beginning = file.read(0, min(file.size, CHUNK_BYTES))
    end = beginning.find(b"\n") + 1 or len(beginning)
    with read_errors(f"the first line of {file.place}", remote=False):
        line = beginning[:end].decode("utf-8-sig").rstrip("\r\n")
        fields = next(csv.reader([line], delimiter=delimiter), [])
    if not fields:
        raise InvalidDataError(f"{file.place} begins with an empty line; a table of columns is wanted.")
    if len(fields) == 1 and ";" in line:
        raise InvalidDataError(
            f"{file.place} separates values by ';', which is not read. Convert it once, for example with "
            "pandas.read_csv(path, sep=';', decimal=',').to_parquet('rows.parquet')."
        )
    return fields, end


def _are_numbers(fields: Sequence[str]) -> bool:
    return all(_is_number(field) for field in fields)


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _default(fields: Sequence[str], where: str) -> list[str]:
    """Return the names of all columns but the index that pandas writes, which has none; warns of it."""
    if fields[0]:
        return list(fields)
    warn_user(f"the first column of {where} has no name: it is the index of a DataFrame, and is left out.")
    return list(fields[1:])


def _chunks(file: CsvFile, begin: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the bytes and the rows at which chunks begin, and where the last one ends."""
    begins, counts = [begin], [0]
    while begins[-1] < file.size:
        text = file.read(begins[-1], min(file.size, begins[-1] + CHUNK_BYTES))
        last = begins[-1] + len(text) == file.size
        if last:
            text = text.rstrip(b"\r\n")
            counts.append(text.count(b"\n") + 1 if text else 0)
            begins.append(file.size)
        elif end := text.rfind(b"\n") + 1:
            counts.append(text.count(b"\n", 0, end))
            begins.append(begins[-1] + end)
        else:
            raise InvalidDataError(f"{file.place} has a line of more than {CHUNK_BYTES:,} bytes.")
    return tuple(begins), tuple(accumulate(counts))


def _check_numbers(reader: CsvReader, where: str, names: Sequence[str]) -> None:
    """Raise `InvalidDtypeError` for a column whose first value is text."""
    if reader.starts[-1] == 0:
        return
    text = reader.file.read(reader.begins[0], min(reader.begins[1], reader.begins[0] + CHUNK_BYTES))
    with read_errors(f"the first row of {where}", remote=False):
        line = text.partition(b"\n")[0].decode().rstrip("\r")
        fields = next(csv.reader([line], delimiter=reader.delimiter), [])
    for name, column in zip(names, reader.chosen, strict=True):
        value = fields[column] if column < len(fields) else ""
        if value and not _is_number(value) and value.lower() not in ("na", "n/a", "null", "#n/a"):
            raise InvalidDtypeError(
                f"column {name!r} of {where} holds text ({short(value)}), not real numbers. Choose the "
                "numeric columns (columns=, --columns), or convert it."
            )
