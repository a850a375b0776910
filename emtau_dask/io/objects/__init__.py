"""Named objects of a run: stores, encoding, commits, and the state of rows."""

from emtau_dask.io.objects.base import ROOT_DOCUMENT, ObjectStore, begun_elsewhere, copy_new
from emtau_dask.io.objects.beginning import FORMAT, VERSION, check_startable, holds_run, open_log, start_log
from emtau_dask.io.objects.commits import CommitLog, new_attempt
from emtau_dask.io.objects.documents import digest, group_document
from emtau_dask.io.objects.encoding import ArrayLayout, decode, encode, read_verified
from emtau_dask.io.objects.local import LocalObjects
from emtau_dask.io.objects.opening import (
    NotExclusiveWarning,
    object_store,
    objects_below,
    try_store,
    warn_unless_exclusive,
)
from emtau_dask.io.objects.prefixed import PrefixedObjects
from emtau_dask.io.objects.row_state import (
    RECENT_BYTES,
    SHARING_ROWS,
    RowFields,
    RowStateWriter,
    SlotState,
    StateObject,
    Witness,
    most_object_rows,
    rows_layout,
)
from emtau_dask.io.objects.zarr_store import ZarrStoreObjects

__all__ = [
    "FORMAT",
    "RECENT_BYTES",
    "ROOT_DOCUMENT",
    "SHARING_ROWS",
    "VERSION",
    "ArrayLayout",
    "CommitLog",
    "LocalObjects",
    "NotExclusiveWarning",
    "ObjectStore",
    "PrefixedObjects",
    "RowFields",
    "RowStateWriter",
    "SlotState",
    "StateObject",
    "Witness",
    "ZarrStoreObjects",
    "begun_elsewhere",
    "check_startable",
    "copy_new",
    "decode",
    "digest",
    "encode",
    "group_document",
    "holds_run",
    "most_object_rows",
    "new_attempt",
    "object_store",
    "objects_below",
    "open_log",
    "read_verified",
    "rows_layout",
    "start_log",
    "try_store",
    "warn_unless_exclusive",
]
