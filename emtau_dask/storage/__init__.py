"""Chunked sources and row state. Knows zarr and dask.array; nothing of EM."""

from emtau_dask.storage.opening import as_dask, as_source, is_lazy, open_source
from emtau_dask.storage.parquet_source import is_parquet
from emtau_dask.storage.rowstate import Generation, RowStateStore
from emtau_dask.storage.sources import ChunkReader, GraphSource, RangeSource, Source
from emtau_dask.storage.zarr_source import group_source

__all__ = [
    "ChunkReader",
    "Generation",
    "GraphSource",
    "RangeSource",
    "RowStateStore",
    "Source",
    "as_dask",
    "as_source",
    "group_source",
    "is_lazy",
    "is_parquet",
    "open_source",
]
