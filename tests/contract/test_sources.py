"""One suite over every source: the rows, the bytes, the tasks, cut elsewhere, and sent elsewhere."""

import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import dask
import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from emtau_dask import InvalidDataError
from emtau_dask.data.dask_arrays import GraphSource
from emtau_dask.data.opening import as_dask, as_source, open_source
from emtau_dask.data.parquet import open_parquet
from emtau_dask.data.source import ChunkRange, chunk_ranges

CHUNKINGS = [(23,), (1,) * 23, (5, 18), (0, 9, 0, 14, 0), (10, 10, 3)]


def chunk_range(source, chunk):
    """A chunk's range, of chunks without rows too."""
    bounds = (0, *accumulate(source.chunk_rows))
    return ChunkRange(chunk, bounds[chunk], bounds[chunk + 1])


def load(source, chunk, reader=None):
    """A chunk's rows and bytes, its references computed by dask's plain scheduler."""
    blocks = dask.get(dict(source.graph([chunk])), source.references(chunk))
    return (reader or source.reader()).load(chunk_range(source, chunk), blocks)[:2]


def expected_rows(made, chunk_rows=None):
    bounds = (0, *accumulate(chunk_rows or made.chunk_rows))
    return [made.rows[start:stop] for start, stop in pairwise(bounds)]


def test_it_says_what_it_is_where_chunks_lie_and_which_tasks_they_need(made):
    source, chunks = made.source, range(len(made.chunk_rows))
    assert (source.shape, source.dtype) == (made.rows.shape, made.rows.dtype)
    assert source.chunk_rows == made.chunk_rows
    assert source.addressable is not made.graph
    assert all(bool(source.references(chunk)) is made.graph for chunk in chunks)
    assert bool(source.graph(list(chunks))) is made.graph
    assert not source.graph([])
    ranges = chunk_ranges(source.chunk_rows)
    assert all(found == chunk_range(source, chunk) for chunk, found in ranges.items())
    rows = np.concatenate([made.rows[found.start : found.stop] for found in ranges.values()])
    assert np.array_equal(rows, made.rows)
    wanted, *others = chunks
    graph = source.graph([wanted])
    assert isinstance(graph, Mapping)
    assert set(source.references(wanted)) <= set(graph)
    assert not {key for chunk in others for key in source.references(chunk)} & set(graph)


def test_places_are_those_of_the_chunks_that_hold_rows():
    ranges = chunk_ranges((0, 4, 0, 0, 19, 0))
    assert ranges == {1: ChunkRange(1, 0, 4), 4: ChunkRange(4, 4, 23)}
    assert [chunk_range.n_rows for chunk_range in ranges.values()] == [4, 19]
    assert chunk_ranges(()) == chunk_ranges((0, 0)) == {}


def test_load_gives_exactly_the_rows_and_counts_their_bytes(made):
    """The stored bytes, or the decoded ones of a graph; again, too, and by a reader that was sent."""
    sent = pickle.loads(pickle.dumps(made.source.reader()))
    for reader in (None, None, sent):
        for chunk, expected in enumerate(expected_rows(made)):
            rows, size = load(made.source, chunk, reader)
            assert np.array_equal(rows, expected), chunk
            assert (rows.dtype, size) == (made.rows.dtype, made.chunk_bytes[chunk]), chunk


def test_loads_side_by_side_give_and_count_the_same(made):
    chunks = list(range(len(made.chunk_rows))) * 4
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda chunk: load(made.source, chunk), chunks))
    expected = expected_rows(made)
    assert [size for _, size in loaded] == made.chunk_bytes * 4
    assert all(np.array_equal(rows, expected[chunk]) for chunk, (rows, _) in zip(chunks, loaded, strict=True))


@pytest.mark.parametrize("chunk_rows", CHUNKINGS, ids=lambda chunks: f"{len(chunks)} chunks")
def test_aligned_gives_the_same_rows_in_other_chunks_and_leaves_the_source(made, chunk_rows):
    aligned = made.source.aligned(chunk_rows)
    assert aligned.chunk_rows == chunk_rows
    for chunk, expected in enumerate(expected_rows(made, chunk_rows)):
        assert np.array_equal(load(aligned, chunk)[0], expected), chunk
    assert made.source.chunk_rows == made.chunk_rows


def test_aligned_to_its_own_chunks_costs_nothing(made):
    aligned = made.source.aligned(made.chunk_rows)
    assert [load(aligned, chunk)[1] for chunk in range(len(made.chunk_rows))] == made.chunk_bytes


def test_a_reader_of_an_addressable_source_reads_any_place(made):
    """It needs no chunk numbers: a range is enough, whatever the chunks are."""
    if made.graph:
        with pytest.raises(InvalidDataError, match=r"chunk 99 .*declares"):
            made.source.reader().load(ChunkRange(99, 3, 11), [made.rows[:3]])
        return
    for start, stop in [(0, 23), (3, 11), (9, 10), (22, 23)]:
        rows = made.source.reader().load(ChunkRange(99, start, stop), []).values
        assert np.array_equal(rows, made.rows[start:stop])


def test_as_a_dask_array_it_has_the_same_rows_and_chunks(made):
    array = as_dask(made.source)
    assert array.chunks[0] == made.chunk_rows
    assert array.dtype == made.rows.dtype
    assert np.array_equal(array.compute(scheduler="synchronous"), made.rows)


DTYPES = ["float32", "float64", "int8", "uint64", "bool", ">f4"]


def typed_rows(dtype):
    return np.random.default_rng(1).integers(0, 2, size=(6, 2)).astype(dtype)


def as_numpy(path, rows):
    return as_source(rows, ndim=rows.ndim, what="X")


def as_npy(path, rows):
    np.save(path / "rows.npy", rows)
    return open_source(str(path / "rows.npy"))


def as_zarr(path, rows):
    return as_source(zarr.create_array(store=path / "rows.zarr", data=rows), ndim=rows.ndim, what="X")


def as_blocks(path, rows):
    return as_source(da.from_array(rows, chunks=2), ndim=rows.ndim, what="X")


def as_graph(path, rows):
    array = da.from_array(rows, chunks=2).map_blocks(np.copy, dtype=rows.dtype)
    return as_source(array, ndim=rows.ndim, what="X")


KINDS = [as_numpy, as_npy, as_zarr, as_blocks, as_graph]


def declared(block, shape=(4, 2), dtype="f8"):
    """A dask array of one block, whatever that is."""
    return da.Array({("rows", 0, 0): block}, "rows", chunks=tuple((n,) for n in shape), dtype=dtype)


@pytest.mark.parametrize(
    "array",
    [
        declared(np.ma.masked_less(np.ones((4, 2)), 0)),
        declared(np.asmatrix(np.ones((4, 2)))),
        declared(np.ones((3, 2))),
        declared(np.ones((4, 3))),
        declared(np.ones((4, 2), "f4")),
        declared([[1.0, 2.0]] * 4),
        declared((np.ones, (4, 2))),
        da.from_array(np.ones((4, 2)), chunks=(2, 1)),
        da.from_array(np.ones((4, 2)), chunks=2) + 1,
        da.from_array(np.ones((4, 2)), chunks=2)[1:],
        da.ones((4, 2)),
    ],
    ids=["masked", "matrix", "short", "wide", "other dtype", "list", "task", "split", "sum", "slice", "ones"],
)
def test_what_is_not_plainly_rows_in_memory_is_a_graph(array):
    assert isinstance(as_source(array, ndim=2, what="X"), GraphSource)


def all_rows(source):
    return np.concatenate([load(source, chunk)[0] for chunk in range(len(source.chunk_rows))])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_real_numbers_of_any_kind_come_as_they_are(kind, dtype, tmp_path):
    rows = typed_rows(dtype)
    source = kind(tmp_path, rows)
    assert source.dtype == rows.dtype
    assert np.array_equal(all_rows(source), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_one_value_a_row_has_one_axis(kind, tmp_path):
    weights = np.arange(7.0)
    source = kind(tmp_path, weights)
    assert source.shape == (7,)
    assert np.array_equal(all_rows(source), weights)


def test_a_parquet_column_may_be_one_value_a_row(tmp_path):
    path = tmp_path / "weights.parquet"
    pq.write_table(pa.table({"w": np.arange(7.0), "name": list("abcdefg")}), path, row_group_size=3)
    source = open_parquet(str(path), ["w"], squeeze=True)
    assert source.shape == (7,)
    assert np.array_equal(all_rows(source), np.arange(7.0))


def test_parquet_columns_come_in_the_order_asked_for(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": [1.0, 2.0], "name": ["x", "y"], "b": [3, 4]}), path)
    rows = all_rows(open_source(str(path), columns=["b", "a"]))
    assert np.array_equal(rows, [[3, 1], [4, 2]])


def test_parquet_nulls_come_as_nan(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": pa.array([1.0, None, 3.0]), "b": pa.array([4.0, 5.0, 6.0])}), path)
    rows = all_rows(open_source(str(path)))
    assert np.array_equal(rows, [[1, 4], [np.nan, 5], [3, 6]], equal_nan=True)


def test_a_source_follows_only_a_plain_from_zarr(tmp_path):
    """Whatever is done to the array after it was opened must not be lost."""
    array = da.from_array(zarr.create_array(store=tmp_path / "a.zarr", data=np.arange(12.0).reshape(6, 2)))
    changed = [array + 1, array[::-1], array[:, ::-1], array.T.T * 2, array.map_blocks(np.negative)]
    for each in changed:
        assert np.array_equal(all_rows(as_source(each, ndim=2, what="X")), each.compute())


LAYOUTS = {
    "plain": {"chunks": (10, 3), "compressors": None},
    "compressed": {"chunks": (10, 3)},
    "sharded": {"chunks": (5, 3), "shards": (10, 3)},
    "format 2": {"chunks": (10, 3), "zarr_format": 2},
    "big endian": {"chunks": (10, 3), "serializer": zarr.codecs.BytesCodec(endian="big")},
    "transposed": {"chunks": (10, 3), "filters": zarr.codecs.TransposeCodec(order=(1, 0))},
    "format 2, by columns": {"chunks": (10, 3), "zarr_format": 2, "order": "F"},
    "wider chunks": {"chunks": (10, 4)},
    "parts of rows": {"chunks": (10, 2)},
}
ADOPTED = {"plain", "compressed", "format 2"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rows_of_one_zarr_chunk_are_its_decoded_bytes_not_a_copy(layout, tmp_path, monkeypatch):
    """zarr would copy them into an array of the result's own, which it begins with."""
    values = np.random.default_rng(0).normal(size=(25, 3))
    source = as_source(
        zarr.create_array(store=tmp_path / "rows", data=values, **LAYOUTS[layout]), ndim=2, what="X"
    )
    begun = []

    def empty(cls, shape, dtype, order="C"):
        begun.append(np.empty(shape, dtype, order))
        return cls(begun[-1])

    monkeypatch.setattr(zarr.core.buffer.cpu.NDBuffer, "empty", classmethod(empty))
    whole = source.reader().load(ChunkRange(0, 10, 20), [])[0]
    assert np.array_equal(whole, values[10:20])
    assert whole.dtype == values.dtype
    assert (not any(np.shares_memory(whole, array) for array in begun)) is (layout in ADOPTED)
    last = source.reader().load(ChunkRange(0, 20, 25), [])[0]
    assert np.array_equal(last, values[20:25])
    for start, stop in [(0, 9), (10, 25), (21, 25), (5, 15)]:
        begun.clear()
        part = source.reader().load(ChunkRange(0, start, stop), [])[0]
        assert np.array_equal(part, values[start:stop])
        assert any(np.shares_memory(part, array) for array in begun)
