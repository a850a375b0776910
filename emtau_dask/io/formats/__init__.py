"""Stored rows by format: .npy, parquet, CSV and zarr; and what readers of any format have in common."""

from emtau_dask.io.formats.base import (
    NONE_UNSTORED,
    ChunkRange,
    ChunkReader,
    Loaded,
    RangeReader,
    RangeSource,
    RowsInMemory,
    Source,
    Unstored,
    chunk_ranges,
    is_in_memory,
    is_stored,
    memory_source,
)
from emtau_dask.io.formats.checks import check_dtype, check_shape, describe_bad_value
from emtau_dask.io.formats.csv import csv_names, has_names, is_csv, open_csv
from emtau_dask.io.formats.kinds import OWN_GROUPS, check_readable, kind_by_ending, kind_of
from emtau_dask.io.formats.npy import npy_source
from emtau_dask.io.formats.parquet import is_parquet, open_parquet, parquet_names
from emtau_dask.io.formats.places import Place, is_pattern, paths_at, place_text
from emtau_dask.io.formats.read_budget import READ_BYTES
from emtau_dask.io.formats.zarr_arrays import group_source, open_zarr, source_in, zarr_source

__all__ = [
    "NONE_UNSTORED",
    "OWN_GROUPS",
    "READ_BYTES",
    "ChunkRange",
    "ChunkReader",
    "Loaded",
    "Place",
    "RangeReader",
    "RangeSource",
    "RowsInMemory",
    "Source",
    "Unstored",
    "check_dtype",
    "check_readable",
    "check_shape",
    "chunk_ranges",
    "csv_names",
    "describe_bad_value",
    "group_source",
    "has_names",
    "is_csv",
    "is_in_memory",
    "is_parquet",
    "is_pattern",
    "is_stored",
    "kind_by_ending",
    "kind_of",
    "memory_source",
    "npy_source",
    "open_csv",
    "open_parquet",
    "open_zarr",
    "parquet_names",
    "paths_at",
    "place_text",
    "source_in",
    "zarr_source",
]
