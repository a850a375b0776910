"""Every kind of source over the same 23 x 3 rows, with the bytes that reading each chunk must cost."""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import dask.array as da
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from tiers import exhaustive_but

from emtau_dask.data.dask_arrays import GraphSource
from emtau_dask.data.opening import as_source, open_source

N, D = 23, 3
ROWS = np.random.default_rng(0).normal(size=(N, D))
ROWS.setflags(write=False)


@dataclass
class Made:
    """A source, and what it must say about itself."""

    source: object
    chunk_rows: tuple
    chunk_bytes: list
    graph: bool = False
    rows: np.ndarray = field(default_factory=lambda: ROWS)


def decoded(chunk_rows, rows=ROWS):
    """Bytes of each chunk's rows in memory."""
    return [rows[start:stop].nbytes for start, stop in pairwise((0, *accumulate(chunk_rows)))]


def write_zarr(path, rows=ROWS, **options):
    zarr.create_array(store=path, data=rows, **options)
    return zarr.open_array(path, mode="r")


def stored(path, chunk):
    """Bytes on disk of all chunk files in one row of chunks (or shards)."""
    return sum(file.stat().st_size for file in (path / "c" / str(chunk)).rglob("*") if file.is_file())


def in_three(path, source, at="."):
    """A source of three chunks of an array in a folder."""
    return Made(source, (10, 10, 3), [stored(path / at, i) for i in range(3)])


def numpy_array(path):
    return Made(as_source(ROWS, ndim=2, what="X"), (23,), decoded((23,)))


def npy_file(path):
    file = path.with_suffix(".npy")
    np.save(file, ROWS)
    return Made(open_source(str(file)), (23,), decoded((23,)))


def zarr_array(path):
    array = write_zarr(path, chunks=(10, D))
    return in_three(path, as_source(array, ndim=2, what="X"))


def zarr_path(path):
    write_zarr(path, chunks=(10, D))
    return in_three(path, open_source(str(path)))


def zarr_group_member(path):
    zarr.create_group(path)
    write_zarr(path / "X", chunks=(10, D))
    return in_three(path, open_source(str(path)), "X")


def zarr_format_2(path):
    array = write_zarr(path, chunks=(10, D), zarr_format=2)
    sizes = [(path / f"{i}.0").stat().st_size for i in range(3)]
    return Made(as_source(array, ndim=2, what="X"), (10, 10, 3), sizes)


def sharded_zarr(path):
    array = write_zarr(path, chunks=(2, D), shards=(8, D))
    return Made(as_source(array, ndim=2, what="X"), (8, 8, 7), [stored(path, i) for i in range(3)])


def feature_split_zarr(path):
    array = write_zarr(path, chunks=(10, 2))
    return in_three(path, as_source(array, ndim=2, what="X"))


def zarr_with_chunks_never_written(path):
    rows = ROWS.copy()
    rows[10:20] = 0
    array = write_zarr(path, rows, chunks=(10, D))
    assert not (path / "c" / "1").exists()
    return Made(
        as_source(array, ndim=2, what="X"), (10, 10, 3), [stored(path, 0), 0, stored(path, 2)], rows=rows
    )


def zarr_read_across_its_chunks(path):
    """Dask chunks of 7, 7, 9 rows over zarr chunks of 10 rows: 0, 0 and 1, 1 and 2."""
    write_zarr(path, chunks=(10, D))
    a, b, c = (stored(path, i) for i in range(3))
    array = da.from_zarr(str(path), chunks=((7, 7, 9), D))
    return Made(as_source(array, ndim=2, what="X"), (7, 7, 9), [a, a + b, b + c])


def plain_from_zarr(path):
    write_zarr(path, chunks=(10, D))
    array = da.from_zarr(str(path))
    return in_three(path, as_source(array, ndim=2, what="X"))


def plain_from_zarr_inline(path):
    write_zarr(path, chunks=(10, D))
    array = da.from_zarr(str(path), inline_array=True)
    return in_three(path, as_source(array, ndim=2, what="X"))


def plain_from_array_of_zarr(path):
    array = da.from_array(write_zarr(path, chunks=(10, D)), chunks=(10, D))
    return in_three(path, as_source(array, ndim=2, what="X"))


def write_parquet(path, rows, row_group_size):
    table = pa.table({f"f{j}": rows[:, j] for j in range(D)})
    pq.write_table(table, path, row_group_size=row_group_size)
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    return [sum(group.column(j).total_compressed_size for j in range(D)) for group in groups]


def parquet_file(path):
    file = path.with_suffix(".parquet")
    sizes = write_parquet(file, ROWS, 10)
    return Made(open_source(str(file)), (10, 10, 3), sizes)


def parquet_folder(path):
    path.mkdir()
    later = write_parquet(path / "b.parquet", ROWS[14:], 5)
    first = write_parquet(path / "a.parquet", ROWS[:14], 14)
    return Made(open_source(str(path)), (14, 5, 4), first + later)


def csv_table(path):
    file = path.with_suffix(".csv")
    np.savetxt(file, ROWS, fmt="%.17e", delimiter=",", header="a,b,c", comments="")
    return Made(open_source(str(file)).aligned((10, 10, 3)), (10, 10, 3), decoded((10, 10, 3)))


def files_of_npy(path):
    path.mkdir()
    np.save(path / "a.npy", ROWS[:14])
    np.save(path / "b.npy", ROWS[14:])
    return Made(open_source(f"{path}/*.npy"), (14, 9), decoded((14, 9)))


def files_of_zarr_read_across(path):
    path.mkdir()
    write_zarr(path / "a.zarr", ROWS[:14], chunks=(10, D))
    write_zarr(path / "b.zarr", ROWS[14:], chunks=(10, D))
    a, b, c = stored(path / "a.zarr", 0), stored(path / "a.zarr", 1), stored(path / "b.zarr", 0)
    source = open_source([f"{path}/a.zarr", f"{path}/b.zarr"]).aligned((9, 9, 5))
    return Made(source, (9, 9, 5), [a, a + b + c, c])


def graph_of(chunks, array=None):
    array = da.from_array(ROWS, chunks=(chunks, D)).map_blocks(np.copy) if array is None else array
    source = as_source(array, ndim=2, what="X")
    assert isinstance(source, GraphSource)
    return Made(source, chunks, decoded(chunks), graph=True)


def graph(path):
    return graph_of((10, 10, 3))


def computed_graph(path):
    write_zarr(path, ROWS - 1, chunks=(10, D))
    made = graph_of((10, 10, 3), da.from_zarr(str(path)) + 1)
    made.rows = (ROWS - 1) + 1
    return made


def sliced_from_zarr(path):
    write_zarr(path, np.concatenate([ROWS[:2], ROWS]), chunks=(5, D))
    return graph_of((3, 5, 5, 5, 5), da.from_zarr(str(path))[2:])


def blocks_in_memory_of(chunks, array):
    source = as_source(array, ndim=2, what="X")
    assert source.in_memory
    return Made(source, chunks, decoded(chunks))


def blocks_in_memory(path):
    return blocks_in_memory_of((10, 10, 3), da.from_array(ROWS, chunks=(10, D)))


def blocks_in_memory_with_empty_chunks(path):
    chunks = (0, 10, 0, 0, 13, 0)
    return blocks_in_memory_of(chunks, da.from_array(ROWS, chunks=(chunks, D)))


def persisted_blocks(path):
    array = da.from_array(ROWS, chunks=(10, D)).map_blocks(np.copy)
    return blocks_in_memory_of((10, 10, 3), array.persist(scheduler="synchronous"))


def feature_split_graph(path):
    return graph_of((10, 10, 3), da.from_array(ROWS, chunks=((10, 10, 3), (1, 2))))


def graph_with_empty_chunks(path):
    return graph_of((0, 10, 0, 0, 13, 0))


def feature_split_graph_with_empty_chunks(path):
    return graph_of((0, 10, 13, 0), da.from_array(ROWS, chunks=((0, 10, 13, 0), (2, 1))))


def addressable_with_empty_chunks(path):
    chunks = (0, 4, 0, 0, 19, 0)
    return Made(as_source(ROWS, ndim=2, what="X").aligned(chunks), chunks, decoded(chunks))


MAKERS = [
    numpy_array,
    npy_file,
    zarr_array,
    zarr_path,
    zarr_group_member,
    zarr_format_2,
    sharded_zarr,
    feature_split_zarr,
    zarr_with_chunks_never_written,
    zarr_read_across_its_chunks,
    plain_from_zarr,
    plain_from_zarr_inline,
    plain_from_array_of_zarr,
    parquet_file,
    parquet_folder,
    csv_table,
    files_of_npy,
    files_of_zarr_read_across,
    graph,
    computed_graph,
    sliced_from_zarr,
    blocks_in_memory,
    blocks_in_memory_with_empty_chunks,
    persisted_blocks,
    feature_split_graph,
    graph_with_empty_chunks,
    feature_split_graph_with_empty_chunks,
    addressable_with_empty_chunks,
]
USUAL = {
    numpy_array,
    npy_file,
    zarr_path,
    sharded_zarr,
    zarr_with_chunks_never_written,
    zarr_read_across_its_chunks,
    parquet_folder,
    csv_table,
    files_of_zarr_read_across,
    computed_graph,
    persisted_blocks,
    feature_split_graph_with_empty_chunks,
    addressable_with_empty_chunks,
}
"""Of each class of sources one, and of each kind of chunks."""


@pytest.fixture(params=exhaustive_but(USUAL, MAKERS), ids=lambda maker: maker.__name__)
def made(request, tmp_path):
    return request.param(tmp_path / "rows")
