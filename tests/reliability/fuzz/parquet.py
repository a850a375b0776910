"""Parquet files and folders: page headers, pages, ends."""

import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from reliability.fuzz import binaries
from reliability.fuzz.rows import read_like

END_BYTES = 8
"""The length of the footer, and the magic number."""


def make(folder):
    """Write the originals."""
    random = np.random.default_rng(2)
    rows = random.normal(size=(60, 3))
    numbers = pa.table({"a": rows[:, 0], "b": rows[:, 1].astype("f4"), "c": np.arange(60) % 7})
    nulls = pa.table({"a": pa.array([None, 1.5] * 30), "b": pa.array([1, None, 3] * 20, pa.int16())})
    strings = pa.table({"a": rows[:, 0], "s": ["x"] * 60, "l": [[1.0, 2.0]] * 60})
    kinds = pa.table(
        {name: pa.array(np.arange(60)).cast(name) for name in ("int8", "uint16", "int64", "float")}
    )
    for name, options in {
        "plain": {"compression": "none", "use_dictionary": False},
        "snappy": {},
        "zstd": {"compression": "zstd"},
        "gzip": {"compression": "gzip"},
        "lz4": {"compression": "lz4"},
        "brotli": {"compression": "brotli"},
        "checked": {"write_page_checksum": True},
        "second": {"data_page_version": "2.0", "version": "2.6"},
        "index": {"write_page_index": True},
        "no-statistics": {"write_statistics": False, "store_schema": False},
        "split": {"column_encoding": "BYTE_STREAM_SPLIT", "use_dictionary": False},
    }.items():
        table = numbers.select(["a", "b"]) if name == "split" else numbers
        pq.write_table(table, folder / f"{name}.parquet", **{"row_group_size": 25, **options})
    pq.write_table(nulls, folder / "nulls.parquet", row_group_size=20)
    pq.write_table(strings, folder / "strings.parquet")
    pq.write_table(kinds, folder / "kinds.parquet", row_group_size=50)
    pq.write_table(pa.table({"h": rows[:, 0].astype("f2"), "t": rows[:, 1] > 0}), folder / "small.parquet")
    pq.write_table(numbers.slice(0, 0), folder / "none.parquet")


def mutate(case):
    """Write a mutated file; return what was done. Arrow's footer stays: pyarrow trusts its fields."""
    chance, how = case.chance, case.chance.random()
    shutil.copyfile(case.original, case.place)
    data = case.place.read_bytes()
    if how < 0.65:
        begin = len(data) - END_BYTES - int.from_bytes(data[-END_BYTES:-4], "little")
        pages, what = binaries.mutated(chance, data[:begin], [4, *_pages(case.place)])
        case.place.write_bytes(pages + data[begin:])
        return f"pages: {what}"
    if how < 0.8:
        cut = chance.randrange(len(data))
        case.place.write_bytes(data[:cut])
        return f"cut at {cut}"
    if how < 0.88:
        end, what = binaries.mutated(chance, data[-END_BYTES:])
        case.place.write_bytes(data[:-END_BYTES] + end)
        return f"length of the footer: {what}"
    if how < 0.94:
        return binaries.strange(chance, case.place)
    case.place.unlink()
    case.place.mkdir()
    shutil.copyfile(case.original, case.place / "a.parquet")
    others = sorted(case.corpus.iterdir())
    other = chance.choice(others)
    shutil.copyfile(other, case.place / "b.parquet")
    return f"a folder of {case.original.name} and {other.name}"


def _pages(file):
    """Return the offsets of the first pages of all columns."""
    metadata = pq.read_metadata(file)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(j) for group in groups for j in range(group.num_columns)]
    return [column.dictionary_page_offset or column.data_page_offset for column in columns]


def target(case):
    """Open and read, beside pyarrow."""
    return read_like(case, case.place, _read, exact=False)


def _read(case):
    if case.place.is_dir():
        tables = [pq.read_table(file, use_threads=False) for file in sorted(case.place.rglob("*.parquet"))]
        table = [table.select(tables[0].column_names) for table in tables]
        parts = [_as_rows(each) for each in table]
        return np.concatenate([part.astype(np.result_type(*parts)) for part in parts])
    return _as_rows(pq.ParquetFile(case.place).read(use_threads=False))


def _as_rows(table):
    """Return a table's rows; a null is NaN."""
    columns = [
        np.asarray(table.column(j).combine_chunks().to_numpy(zero_copy_only=False))
        for j in range(table.num_columns)
    ]
    kinds = [field.type.to_pandas_dtype() for field in table.schema]
    return np.stack(columns, axis=1).astype(
        np.float64 if any(column.null_count for column in table.columns) else np.result_type(*kinds)
    )
