"""Chunked rows and the ways to them: memory, .npy, parquet, zarr and dask arrays."""

from emtau_dask.io.sources.base import (
    ChunkRange,
    ChunkReader,
    RangeReader,
    RangeSource,
    Source,
    chunk_ranges,
    is_stored,
)
from emtau_dask.io.sources.checks import check_dtype, check_shape, describe_bad_value
from emtau_dask.io.sources.dask_arrays import GraphSource, array_of_blocks, plain_zarr_of, zarr_beneath
from emtau_dask.io.sources.opening import as_dask, as_source, is_lazy, open_source, unlabelled
from emtau_dask.io.sources.parquet import is_parquet, open_parquet, parquet_names
from emtau_dask.io.sources.read_budget import READ_BYTES
from emtau_dask.io.sources.shared import SharedRows, shared_rows, values_digest
from emtau_dask.io.sources.zarr_arrays import group_source, zarr_source

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
