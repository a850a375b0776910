"""From what users have to chunked rows: arrays, dask graphs, and files of any format."""

from emtau_dask.io.formats import (
    READ_BYTES,
    ChunkRange,
    ChunkReader,
    RangeReader,
    RangeSource,
    Source,
    check_dtype,
    check_shape,
    chunk_ranges,
    describe_bad_value,
    group_source,
    is_parquet,
    is_stored,
    open_parquet,
    parquet_names,
    zarr_source,
)
from emtau_dask.io.sources.dask_arrays import GraphSource, array_of_blocks, plain_zarr_of, zarr_beneath
from emtau_dask.io.sources.opening import as_dask, as_source, is_lazy, open_source, unlabelled
from emtau_dask.io.sources.shared import SharedRows, shared_rows, values_digest

__all__ = [
    "READ_BYTES",
    "ChunkRange",
    "ChunkReader",
    "GraphSource",
    "RangeReader",
    "RangeSource",
    "SharedRows",
    "Source",
    "array_of_blocks",
    "as_dask",
    "as_source",
    "check_dtype",
    "check_shape",
    "chunk_ranges",
    "describe_bad_value",
    "group_source",
    "is_lazy",
    "is_parquet",
    "is_stored",
    "open_parquet",
    "open_source",
    "parquet_names",
    "plain_zarr_of",
    "shared_rows",
    "unlabelled",
    "values_digest",
    "zarr_beneath",
    "zarr_source",
]
