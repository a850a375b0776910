"""Rows of zarr that are the bytes of a local file: where they are, and where zarr decodes them.

Expected rows are those that were written; where they are views, also what NumPy reads from the files.
"""

from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec

from emtau_dask.data.opening import open_source
from emtau_dask.data.source import chunk_ranges
from emtau_dask.data.zarr_arrays import CountingStore, LocalChunks
from emtau_dask.errors import EmtauError
from emtau_dask.storage.direct_reads import KEY

CHUNK, N, D = 2**15, 3 * 2**15 - 5, 4
"""Chunks of 1 MiB, the last one not full."""
ROWS = np.random.default_rng(0).normal(size=(N, D))
PLAIN = {"compressors": None}
WHOLE = {
    "format 3": PLAIN,
    "format 2": PLAIN | {"zarr_format": 2},
    "format 2, big-endian": PLAIN | {"zarr_format": 2, "dtype": ">f8"},
    "float32": PLAIN | {"dtype": "f4"},
    "int16": PLAIN | {"dtype": "i2"},
    "chunk keys with dots": PLAIN | {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "chunk keys of format 2": PLAIN | {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "a chunk longer than the array": PLAIN | {"chunks": (N + 100, D)},
}
DECODED = {
    "big-endian": PLAIN | {"serializer": BytesCodec(endian="big")},
    "transposed": PLAIN | {"filters": [TransposeCodec(order=(1, 0))]},
    "format 2, order F": PLAIN | {"zarr_format": 2, "order": "F"},
    "checksum": {"compressors": [Crc32cCodec()]},
    "compressed": {"compressors": [GzipCodec(level=1)]},
    "shards": PLAIN | {"shards": (CHUNK, D), "chunks": (CHUNK // 4, D)},
    "two chunks side by side": PLAIN | {"chunks": (CHUNK, D // 2)},
}


def written(folder, rows=ROWS, **stored):
    stored = {"chunks": (CHUNK, D), "dtype": "f8", "fill_value": 7} | stored
    array = zarr.create_array(store=folder / "rows.zarr", shape=rows.shape, **stored)
    array[...] = rows.astype(stored["dtype"])
    return folder / "rows.zarr"


@pytest.fixture
def asked(monkeypatch):
    """Note each key that zarr reads."""
    keys, get = [], CountingStore.get

    async def noted(self, key, *others, **named):
        keys.append(key)
        return await get(self, key, *others, **named)

    monkeypatch.setattr(CountingStore, "get", noted)
    return keys


def chunks_of(path):
    source = open_source(str(path))
    return [source.reader().load(where, [])[:2] for where in chunk_ranges(source.chunk_rows).values()]


def from_file(path, chunk, dtype):
    """Return what NumPy reads from the file of a chunk."""
    (file,) = (
        path / name
        for name in (f"c/{chunk}/0", f"c.{chunk}.0", f"{chunk}.0", f"{chunk}/0")
        if (path / name).is_file()
    )
    return np.fromfile(file, dtype).reshape(-1, D)


@pytest.mark.parametrize("name", WHOLE)
def test_rows_that_lie_in_one_file_are_its_bytes(name, tmp_path, asked):
    path = written(tmp_path, **WHOLE[name])
    found = chunks_of(path)
    assert asked == []
    dtype = np.dtype(WHOLE[name].get("dtype", "f8"))
    begin = 0
    for chunk, (rows, size) in enumerate(found):
        stored = from_file(path, chunk, dtype)
        assert rows.dtype == dtype
        assert rows.flags.c_contiguous
        assert size == stored.nbytes
        np.testing.assert_array_equal(rows, stored[: len(rows)])
        np.testing.assert_array_equal(rows, ROWS[begin : begin + len(rows)].astype(dtype))
        begin += len(rows)
    assert begin == N


@pytest.mark.parametrize("name", DECODED)
def test_rows_that_are_stored_otherwise_are_decoded_by_zarr(name, tmp_path, asked):
    rows = np.concatenate([rows for rows, _ in chunks_of(written(tmp_path, **DECODED[name]))])
    assert asked != []
    np.testing.assert_array_equal(rows, ROWS)


def test_parts_of_a_chunk_and_several_chunks_are_read_by_zarr(tmp_path, asked):
    reader = open_source(str(written(tmp_path, **PLAIN))).ranges
    for start, stop in [(0, CHUNK - 1), (1, CHUNK), (0, CHUNK + 1), (2 * CHUNK, N - 1), (0, N)]:
        asked.clear()
        np.testing.assert_array_equal(reader.read(start, stop)[0], ROWS[start:stop])
        assert asked != []


def test_one_value_a_row(tmp_path, asked):
    path = written(tmp_path, rows=ROWS[:, 0], chunks=(CHUNK,), **PLAIN)
    np.testing.assert_array_equal(np.concatenate([rows for rows, _ in chunks_of(path)]), ROWS[:, 0])
    assert asked == []


def test_a_chunk_that_is_not_stored_holds_the_fill_value(tmp_path, asked):
    path = written(tmp_path, **PLAIN)
    (path / "c/1/0").unlink()
    (first, _), (second, size), (third, _) = chunks_of(path)
    assert asked == ["c/1/0"]
    assert size == 0
    np.testing.assert_array_equal(second, np.full((CHUNK, D), 7.0))
    np.testing.assert_array_equal(
        np.concatenate([first, third]), np.delete(ROWS, np.s_[CHUNK : 2 * CHUNK], 0)
    )


def shorten(file):
    file.write_bytes(file.read_bytes()[:-8])


def lengthen(file):
    file.write_bytes(file.read_bytes() + bytes(8))


def empty(file):
    file.write_bytes(b"")


def make_folder(file):
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("direct", ["never", "always"])
@pytest.mark.parametrize("damage", [shorten, lengthen, empty, make_folder])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_damage_is_what_it_is_to_zarr(damage, zarr_format, direct, tmp_path, monkeypatch):
    path = written(tmp_path, zarr_format=zarr_format, **PLAIN)
    damage(path / ("1.0" if zarr_format == 2 else "c/1/0"))

    def outcome():
        try:
            return [(rows.tobytes(), size) for rows, size in chunks_of(path)]
        except EmtauError as error:
            return type(error), str(error)

    with dask.config.set({KEY: direct}):
        found = outcome()
        monkeypatch.setattr(LocalChunks, "read", lambda *arguments: None)
        assert found == outcome()


@pytest.mark.parametrize("direct", ["never", "always"])
def test_rows_stay_while_others_are_read_by_many_threads(direct, tmp_path):
    path = written(tmp_path, **PLAIN)
    ranges = list(chunk_ranges(open_source(str(path)).chunk_rows).values())
    reader = open_source(str(path)).reader()

    def read(number):
        where = ranges[number % len(ranges)]
        rows = reader.load(where, []).values
        part = rows[number % 7 :: 5]
        del rows
        return where.start + number % 7, where.stop, part

    with dask.config.set({KEY: direct}), ThreadPoolExecutor(4) as threads:
        kept = []
        for number, (start, stop, part) in enumerate(threads.map(read, range(60))):
            np.testing.assert_array_equal(part, ROWS[start:stop:5])
            if number % 4 == 0:
                kept.append((start, stop, part))
        for start, stop, part in kept:
            np.testing.assert_array_equal(part, ROWS[start:stop:5])


@settings(deadline=None, max_examples=30)
@given(reads=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=20))
def test_no_read_changes_what_an_earlier_one_returned(reads, stored_once):
    path, held = stored_once, []
    source = open_source(str(path))
    reader, ranges = source.reader(), list(chunk_ranges(source.chunk_rows).values())
    for chunk, keep in reads:
        rows = reader.load(ranges[chunk], []).values
        held = [*held, (chunk, rows[::3])] if keep else held[1:]
        del rows
        for other, part in held:
            np.testing.assert_array_equal(part, from_file(path, other, "f8")[: ranges[other].n_rows : 3])


@pytest.fixture(scope="module")
def stored_once(tmp_path_factory):
    return written(tmp_path_factory.mktemp("once"), **PLAIN)
