"""What zarr files may say: metadata, codecs and types that are checked before zarr opens anything."""

from emtau_dask.io.zarr_format.documents import (
    MAX_DOCUMENT_BYTES,
    ArrayDocument,
    Found,
    StoredArray,
    document_at,
    get_within,
    local_within,
)
from emtau_dask.io.zarr_format.memory import MAX_CHUNKS_AT_ONCE, ZarrLayout
from emtau_dask.io.zarr_format.own_groups import own_group
from emtau_dask.io.zarr_format.unstored import ShardIndex, count_unstored, place_of_object

__all__ = [
    "MAX_CHUNKS_AT_ONCE",
    "MAX_DOCUMENT_BYTES",
    "ArrayDocument",
    "Found",
    "ShardIndex",
    "StoredArray",
    "ZarrLayout",
    "count_unstored",
    "document_at",
    "get_within",
    "local_within",
    "own_group",
    "place_of_object",
]
