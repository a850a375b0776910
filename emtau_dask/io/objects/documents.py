"""Metadata documents of zarr groups; a digested one states the digest of its own content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from emtau_dask.errors import CheckpointCorruptError
from emtau_dask.io.objects.base import ObjectStore


def digest(data: bytes) -> str:
    """Return the SHA-256 of an object's bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """Return a zarr v3 group's metadata document; raises ValueError for NaN or infinity, unknown to JSON."""
    document = {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def digested_document(content: Mapping[str, Any]) -> bytes:
    """Return a group document whose attributes are ``content`` and the digest of that."""
    return group_document({**content, "sha256": digest(_canonical(content))})


def _canonical(content: Any) -> bytes:
    return json.dumps(content, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def read_document(objects: ObjectStore, key: str, limit: int) -> dict[str, Any]:
    """Return the content of a digested document of at most ``limit`` bytes.

    Raises `CheckpointCorruptError` where it is missing, too large, damaged, or not what its digest says.
    """
    data = objects.get(key, limit)
    where = f"{key} in {objects.location}"
    if data is None:
        raise CheckpointCorruptError(f"{where} is missing.")
    if len(data) > limit:
        raise CheckpointCorruptError(f"{where} has more than {limit:,} bytes, the most that is read.")
    try:
        document = json.loads(data)
        content = document["attributes"]
        expected = content.pop("sha256")
        intact = document["node_type"] == "group" and digest(_canonical(content)) == expected
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} is damaged ({type(error).__name__}: {error}).") from error
    if not intact:
        raise CheckpointCorruptError(f"{where} has been altered: its SHA-256 is not the one that it states.")
    return dict(content)
