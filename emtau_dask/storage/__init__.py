"""Chunked sources, row state, objects and commits. Knows zarr and dask.array; nothing of EM."""

from emtau_dask.storage.commits import Commit, CommitLog, new_attempt, open_log, start_log
from emtau_dask.storage.dask_source import GraphSource, array_of_blocks
from emtau_dask.storage.objects import LocalObjects, ObjectStore
from emtau_dask.storage.parallel import each
from emtau_dask.storage.opening import as_dask, as_source, is_lazy, open_source
from emtau_dask.storage.own_groups import OwnGroup, own_group
from emtau_dask.storage.parquet_source import is_parquet
from emtau_dask.storage.publishing import published
from emtau_dask.storage.remote import object_store
from emtau_dask.storage.rowcache import CachedRows, RowCache, release_rows
from emtau_dask.storage.rowstate import RowFields, RowStateWriter, SlotState, Witness, rows_layout
from emtau_dask.storage.scratch import ScratchFolder
from emtau_dask.storage.sources import (
    ChunkPlace,
    ChunkReader,
    RangeSource,
    Source,
    is_stored,
    places_of,
)
from emtau_dask.storage.stored import ArrayLayout
from emtau_dask.storage.zarr_source import group_source

__all__ = [
    "ArrayLayout",
    "CachedRows",
    "ChunkPlace",
    "ChunkReader",
    "Commit",
    "CommitLog",
    "GraphSource",
    "LocalObjects",
    "ObjectStore",
    "OwnGroup",
    "RangeSource",
    "RowCache",
    "RowFields",
    "RowStateWriter",
    "ScratchFolder",
    "SlotState",
    "Source",
    "Witness",
    "array_of_blocks",
    "as_dask",
    "as_source",
    "each",
    "group_source",
    "is_lazy",
    "is_parquet",
    "is_stored",
    "new_attempt",
    "object_store",
    "open_log",
    "open_source",
    "own_group",
    "places_of",
    "published",
    "release_rows",
    "rows_layout",
    "start_log",
]
