"""The row groups that the footer of a parquet file declares; it is a struct in thrift's compact protocol.

pyarrow reads footers too. But its accessors of row groups and columns do not expect C++ exceptions: a
footer that contradicts itself ends the process there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

MAGIC = b"PAR1"
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT, UUID = range(1, 14)
INTEGERS = (I32, I64, I16)
FIXED = {TRUE: 1, FALSE: 1, BYTE: 1, DOUBLE: 8, UUID: 16}
"""Bytes of an item of a list, or of a field."""
DEPTH = 32
"""The deepest nesting of structs and lists that is read; the format has fewer than ten levels."""

# Numbers of fields, as parquet.thrift has them.
ROW_GROUPS = 4
COLUMNS, NUM_ROWS = 1, 3
META_DATA = 3
PHYSICAL_TYPE, PATH_IN_SCHEMA, NUM_VALUES, COMPRESSED_SIZE, STATISTICS = 1, 3, 5, 7, 12
NULL_COUNT = 3
PHYSICAL_TYPES = range(8)
"""From BOOLEAN to FIXED_LEN_BYTE_ARRAY."""

_Wanted = Mapping[int, "_Wanted"]
WANTED: _Wanted = {
    ROW_GROUPS: {
        COLUMNS: {
            META_DATA: {
                PHYSICAL_TYPE: {},
                PATH_IN_SCHEMA: {},
                NUM_VALUES: {},
                COMPRESSED_SIZE: {},
                STATISTICS: {NULL_COUNT: {}},
            }
        },
        NUM_ROWS: {},
    }
}
"""The fields that are kept, and those of the structs in them; most of a footer is skipped."""


@dataclass(frozen=True)
class ColumnChunk:
    """The values of one column in one row group: ``stored`` compressed bytes.

    ``path`` joins the names of the column and of what holds it by points. ``n_values`` counts nulls too; it
    is the number of rows, unless the column holds lists. ``null_count`` is None where it is not declared.
    """

    path: str
    n_values: int
    stored: int
    null_count: int | None


@dataclass(frozen=True)
class StoredGroup:
    """One row group; its columns are in the order of the schema's leaves."""

    n_rows: int
    columns: tuple[ColumnChunk, ...]


def row_groups_of(file: BinaryIO, size: int) -> list[StoredGroup]:
    """Return the row groups of a parquet file of ``size`` bytes.

    Raises
    ------
    ValueError
        It is no parquet file, or its footer is damaged.
    """
    if size < 12:
        raise ValueError(f"it has {size} bytes, too few for a parquet file")
    file.seek(size - 8)
    end = file.read(8)
    length = int.from_bytes(end[:4], "little")
    if end[4:] != MAGIC or length > size - 12:
        raise ValueError("its end is not that of a parquet file without encryption")
    file.seek(size - 8 - length)
    try:
        footer = _Compact(file.read(length)).struct(WANTED, DEPTH)
        return [_group(group, size) for group in footer[ROW_GROUPS]]
    except (AttributeError, IndexError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"its footer is damaged ({type(error).__name__}: {error})") from error


def _group(group: dict[int, Any], size: int) -> StoredGroup:
    columns = tuple(_column(column[META_DATA], size) for column in group[COLUMNS])
    if not 0 <= group[NUM_ROWS] < 2**48:
        raise ValueError(f"its footer is damaged: a row group has {group[NUM_ROWS]:,} rows")
    return StoredGroup(group[NUM_ROWS], columns)


def _column(meta: dict[int, Any], size: int) -> ColumnChunk:
    path = b".".join(meta[PATH_IN_SCHEMA]).decode()
    if meta[PHYSICAL_TYPE] not in PHYSICAL_TYPES:
        raise ValueError(f"its footer is damaged: a column has the physical type {meta[PHYSICAL_TYPE]}")
    stored = meta[COMPRESSED_SIZE]
    if not 0 <= stored <= size:
        raise ValueError(f"its footer is damaged: of {size:,} bytes, a column has {stored:,}")
    return ColumnChunk(path, int(meta[NUM_VALUES]), stored, meta.get(STATISTICS, {}).get(NULL_COUNT))


def _check_depth(depth: int) -> None:
    if depth < 0:
        raise ValueError("its footer is damaged: it is nested too deeply")


class _Compact:
    """Reads thrift's compact protocol: structs as dicts by field number, lists as lists.

    It never reads past the end of the bytes, whatever lengths they declare.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, wanted: _Wanted, depth: int) -> dict[int, Any]:
        """Return the wanted fields of the struct that begins here."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            kind = head & 15
            if kind in (TRUE, FALSE):
                continue
            inner = wanted.get(number)
            if inner is None:
                self._skip(kind, depth)
            else:
                fields[number] = self._value(kind, inner, depth)
        return fields

    def _value(self, kind: int, wanted: _Wanted, depth: int) -> Any:
        _check_depth(depth)
        if kind in INTEGERS:
            return self._integer()
        if kind == BINARY:
            return self._bytes(self._varint())
        if kind == STRUCT:
            return self.struct(wanted, depth - 1)
        if kind == LIST:
            inner, length = self._list()
            return [self._value(inner, wanted, depth - 1) for _ in range(length)]
        raise ValueError(f"its footer is damaged: it holds a value of type {kind}")

    def _skip(self, kind: int, depth: int) -> None:
        _check_depth(depth)
        if kind in INTEGERS:
            self._varint()
        elif kind == BINARY:
            self._bytes(self._varint())
        elif kind == STRUCT:
            self.struct({}, depth - 1)
        elif kind in (LIST, SET):
            inner, length = self._list()
            for _ in range(length):
                self._skip(inner, depth - 1)
        elif kind in FIXED:
            self._bytes(FIXED[kind])
        else:
            raise ValueError(f"its footer is damaged: it holds a value of type {kind}")

    def _list(self) -> tuple[int, int]:
        """Return the kind of a list's items and their number."""
        head = self._byte()
        length = self._varint() if head >> 4 == 15 else head >> 4
        if length > len(self._data) - self._at:
            raise ValueError(f"its footer is damaged: a list of {length:,} items")
        return head & 15, length

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ValueError("its footer is damaged: an integer of more than 64 bits")

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _bytes(self, length: int) -> bytes:
        if length > len(self._data) - self._at:
            raise ValueError(f"its footer is damaged: {length:,} bytes where fewer are left")
        self._at += length
        return self._data[self._at - length : self._at]
