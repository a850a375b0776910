"""Footers of parquet files: as pyarrow reads them, and refused where they contradict themselves."""

import io
import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from reliability.fuzz import thrift

from emtau_dask.data.opening import open_source
from emtau_dask.data.parquet import row_groups_of
from emtau_dask.errors import InvalidDataError

VALUES = np.arange(60.0)
TABLE = pa.table(
    {"a": VALUES, "b": pa.array([None, 1, 2] * 20, pa.int16()), "s": [f"text {i}" for i in range(60)]}
)
NESTED = pa.table({"a": VALUES, "l": [[1.0, 2.0]] * 60, "t": [{"x": 1, "y": 2.0}] * 60})
ROW_GROUPS, COLUMNS, META_DATA = 4, 1, 3


def written(table, **options):
    file = io.BytesIO()
    pq.write_table(table, file, **{"row_group_size": 25, **options})
    return file.getvalue()


@pytest.mark.parametrize(
    "table", [TABLE, NESTED, TABLE.slice(0, 0), pa.table({f"c{i}": VALUES for i in range(20)})]
)
@pytest.mark.parametrize(
    "options", [{}, {"write_statistics": False}, {"write_page_index": True}, {"version": "1.0"}]
)
def test_row_groups_are_those_that_pyarrow_sees(table, options):
    data = written(table, **options)
    found = row_groups_of(io.BytesIO(data), len(data))
    metadata = pq.ParquetFile(io.BytesIO(data)).metadata
    assert len(found) == metadata.num_row_groups
    for number, group in enumerate(found):
        theirs = metadata.row_group(number)
        assert (group.n_rows, len(group.columns)) == (theirs.num_rows, theirs.num_columns)
        for j, column in enumerate(group.columns):
            chunk = theirs.column(j)
            known = chunk.statistics is not None and chunk.statistics.has_null_count
            expected = (
                chunk.path_in_schema,
                chunk.total_compressed_size,
                chunk.statistics.null_count if known else None,
            )
            assert (column.path, column.stored, column.null_count) == expected


def changed(tmp_path, change):
    """Write a file whose footer ``change`` has altered."""
    data = written(TABLE.select(["a", "b"]))
    begin = len(data) - 8 - struct.unpack("<I", data[-8:-4])[0]
    footer = thrift.parsed(data[begin:-8])
    change(footer)
    made = thrift.written(footer)
    path = tmp_path / "x.parquet"
    path.write_bytes(data[:begin] + made + struct.pack("<I", len(made)) + b"PAR1")
    return str(path)


def field(fields, *path):
    for key in path:
        fields = (
            fields["items"][key[0]] if isinstance(key, tuple) else next(f for f in fields if f[0] == key)[2]
        )
    return fields


def without_a_column(footer):
    field(footer, ROW_GROUPS, (1,), COLUMNS)["items"].pop()


def with_a_column_more(footer):
    items = field(footer, ROW_GROUPS, (1,), COLUMNS)["items"]
    items.append(items[0])


def without_the_columns_description(footer):
    column = field(footer, ROW_GROUPS, (0,), COLUMNS, (0,))
    column[:] = [each for each in column if each[0] != META_DATA]


def with_an_unknown_type(footer):
    field(footer, ROW_GROUPS, (0,), COLUMNS, (0,), META_DATA)[0][2] = -5


def with_rows(n_rows):
    def change(footer):
        next(each for each in field(footer, ROW_GROUPS, (0,)) if each[0] == 3)[2] = n_rows

    return change


def with_stored_bytes(n_bytes):
    def change(footer):
        meta = field(footer, ROW_GROUPS, (0,), COLUMNS, (0,), META_DATA)
        next(each for each in meta if each[0] == 7)[2] = n_bytes

    return change


CONTRADICTIONS = {
    "a column less": without_a_column,
    "a column more": with_a_column_more,
    "no description": without_the_columns_description,
    "unknown type": with_an_unknown_type,
    "rows -1": with_rows(-1),
    "rows 2**62": with_rows(2**62),
    "rows 26": with_rows(26),
    "bytes -1": with_stored_bytes(-1),
    "bytes 2**40": with_stored_bytes(2**40),
}


@pytest.mark.parametrize("how", CONTRADICTIONS)
def test_a_footer_that_contradicts_itself_is_refused(tmp_path, how):
    """pyarrow's accessors of the same metadata end the process for some of these."""
    path = changed(tmp_path, CONTRADICTIONS[how])

    def read():
        source = open_source(path)
        return source.ranges.read(0, source.shape[0])[:2]

    with pytest.raises(InvalidDataError, match=r"x\.parquet (cannot be read|contradicts itself)"):
        read()


def test_deep_lists_are_refused():
    deep = b"\x19" + b"\x19" * 5000 + b"\x00" * 9
    data = b"PAR1" + deep + struct.pack("<I", len(deep)) + b"PAR1"
    with pytest.raises(ValueError, match="nested too deeply"):
        row_groups_of(io.BytesIO(data), len(data))


@pytest.mark.parametrize(
    "end", [b"", b"PAR1", b"\xff\xff\xff\x7fPAR1", b"\x00\x00\x00\x00PARE", b"\x05\x00\x00\x00PAR1"]
)
def test_an_end_that_is_none_is_refused(tmp_path, end):
    (tmp_path / "x.parquet").write_bytes(b"PAR1" + b"\x19" * 20 + end)
    with pytest.raises(InvalidDataError, match=r"x\.parquet cannot be read"):
        open_source(str(tmp_path / "x.parquet"))


@pytest.mark.parametrize("table", [pa.table({}), pa.Table.from_arrays([pa.array(VALUES)] * 2, ["a", "a"])])
def test_columns_are_chosen_by_names_of_their_own(tmp_path, table):
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(InvalidDataError, match="columns"):
        open_source(str(tmp_path / "x.parquet"))
