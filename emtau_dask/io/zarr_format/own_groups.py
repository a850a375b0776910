"""Zarr groups that this package wrote, such as saved models, read without trust.

A model may come from a stranger. Only format 3 is read, only each array's own document, and only the
data types and codecs that this package writes. Arrays that declare far more than is stored are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zarr.abc.store import Store
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import LocalStore, MemoryStore, StorePath

from emtau_dask.errors import EmtauError, InvalidDataError, shutdown_named
from emtau_dask.io.remote import Url, UrlStore, is_url, plain_path
from emtau_dask.io.zarr_format.documents import ArrayDocument, StoredArray, document_at, get_within
from emtau_dask.messages import cause_of

DTYPES = frozenset({"float64", "int64", "int32", "bool"})
CODECS = frozenset({"bytes", "zstd"})
MAX_CHUNKS = 2**16
PLAIN_BYTES, MOST_COMPRESSED = 2**26, 100
"""Arrays may declare so many bytes, and beyond that so many times their stored bytes."""


@dataclass(frozen=True, eq=False)
class OwnGroup:
    """A group at a path of a store, and its attributes."""

    store: Store
    path: str
    attributes: Mapping[str, Any]

    def arrays(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Return the values of arrays of the group, by name.

        Raises
        ------
        InvalidDataError
            An array is missing or is not as this package writes it, or they declare too many bytes for
            those stored.
        Exception
            Whatever zarr and codecs raise for damage.
        """
        read = {name: self._read(name) for name in names}
        declared = sum(array.description.n_bytes for array, _ in read.values())
        found = sum(size for _, size in read.values())
        if declared > PLAIN_BYTES + MOST_COMPRESSED * found:
            raise InvalidDataError(
                f"its arrays declare {declared:,} bytes, but only {found:,} are stored, too few for them"
            )
        return {name: np.asarray(array.array[...]) for name, (array, _) in read.items()}

    def _read(self, name: str) -> tuple[StoredArray, int]:
        """Return an array whose stored bytes were copied to memory, and their number."""
        path = f"{self.path}/{name}".lstrip("/")
        found = document_at(self.store, path, (3,))
        if found is None or found.kind != "array":
            raise InvalidDataError(f"{name} is not an array")
        description = ArrayDocument.checked(found.document, name)
        document = description.document
        codecs = {codec.get("name") if isinstance(codec, Mapping) else codec for codec in document["codecs"]}
        if document["data_type"] not in DTYPES or not codecs <= CODECS:
            raise InvalidDataError(
                f"{name} is of {document['data_type']!r} with the codecs {sorted(map(str, codecs))}, which "
                "emtau does not write"
            )
        memory: dict[str, Buffer] = {}
        there = StoredArray(MemoryStore(memory), "", description)
        counts = [-(-n // step) for n, step in zip(description.shape, description.chunks, strict=True)]
        if math.prod(max(1, count) for count in counts) > MAX_CHUNKS:
            raise InvalidDataError(f"{name} has {math.prod(counts):,} chunks, more than emtau writes")
        for place in np.ndindex(*counts):
            key = there.array.metadata.encode_chunk_key(place)
            data = sync(
                get_within(self.store, f"{path}/{key}", default_buffer_prototype(), description.object_limit)
            )
            if data is not None:
                memory[key] = data
        return there, sum(map(len, memory.values()))


def own_group(where: object) -> OwnGroup | None:
    """Return the zarr group of format 3 at a path, a URL or in an open zarr store; None where there is none.

    Raises
    ------
    InvalidDataError
        What is there is something else, or cannot be read.
    """
    store, path = _store_of(where)
    try:
        with shutdown_named():
            found = document_at(store, path, (3,))
    except EmtauError:
        raise
    except Exception as error:  # whatever a store says
        message = f"{where} cannot be read ({type(error).__name__}: {error})."
        raise InvalidDataError(message) from cause_of(error)
    if found is None or found.kind != "group":
        return None
    attributes = found.document.get("attributes", {})
    if not isinstance(attributes, Mapping):
        raise InvalidDataError(f"{where} has attributes that are no JSON object.")
    return OwnGroup(store, path, attributes)


def _store_of(where: object) -> tuple[Store, str]:
    if isinstance(where, StorePath):
        return where.store, where.path
    if isinstance(where, Store):
        return where, ""
    if isinstance(where, (str, Path)):
        place = plain_path(str(where))
        return (UrlStore(Url.of(place)) if is_url(place) else LocalStore(place, read_only=True)), ""
    raise InvalidDataError(f"{where!r} is no place of a zarr group; give a path, a URL or a zarr store.")
