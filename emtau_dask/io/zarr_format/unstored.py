"""Which chunks of a zarr array are not stored: whole objects, and those that the index of a shard lacks."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import Buffer

from emtau_dask.io.zarr_format.codecs import allowed
from emtau_dask.io.zarr_format.documents import INDEX, StoredArray
from emtau_dask.io.zarr_format.memory import ZarrLayout, n_parts
from emtau_dask.mixture.numerics import Bools

ENTRY_BYTES, NOT_STORED = 16, 2**64 - 1
"""Of a chunk in the index of a shard: its offset and its length, which both are this where there is none.
https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html"""
CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard of ``shape`` chunks: ``size`` bytes at its end, or at its beginning."""

    shape: tuple[int, ...]
    size: int
    at_end: bool
    dtype: str

    @classmethod
    def of(cls, stored: StoredArray) -> ShardIndex | None:
        """Return the index of an array's shards; None where it has none."""
        described = stored.description
        if described.shards is None:
            return None
        sharding = described.document["codecs"][0]["configuration"]
        codecs = dict(allowed(codec, INDEX, described.where) for codec in sharding["index_codecs"])
        shape = tuple(shard // chunk for shard, chunk in zip(described.shards, described.chunks, strict=True))
        return cls(
            shape,
            ENTRY_BYTES * math.prod(shape) + (CHECKSUM_BYTES if "crc32c" in codecs else 0),
            sharding.get("index_location", "end") == "end",
            ">u8" if codecs["bytes"].get("endian") == "big" else "<u8",
        )

    def lacking(self, value: Buffer, byte_range: ByteRequest | None) -> Bools | None:
        """Return which chunks a shard lacks, from what a range of it was read as; None for another part."""
        if byte_range is None:
            data = value[-self.size :] if self.at_end else value[: self.size]
        elif byte_range == (SuffixByteRequest(self.size) if self.at_end else RangeByteRequest(0, self.size)):
            data = value
        else:
            return None
        if len(data) != self.size:  # Zarr will say so.
            return None
        entries = np.frombuffer(data.to_bytes(), self.dtype, 2 * math.prod(self.shape))
        found: Bools = (entries.reshape(*self.shape, 2) == NOT_STORED).all(axis=-1)
        return found


def place_of_object(key: str) -> tuple[int, ...]:
    """Return the place of a stored object along each axis, from its key below the array, such as c/7/0."""
    return tuple(map(int, re.findall(r"\d+", key)))


def count_unstored(
    layout: ZarrLayout, start: int, stop: int, objects: Mapping[tuple[int, ...], Bools | None]
) -> tuple[int, int]:
    """Return how many of the chunks that begin in some rows are not stored, and how many these are.

    Parameters
    ----------
    layout : ZarrLayout
    start, stop : int
    objects : mapping of tuple of int to ndarray of bool or None
        Which chunks objects lack, by the object's place along each axis; None where it is not there at all.
    """
    rows, *widths = layout.chunks
    limits = [(-(-start // rows), -(-stop // rows))]
    limits += [(0, -(-size // width)) for size, width in zip(layout.shape[1:], widths, strict=True)]
    per_object = [stored // chunk for stored, chunk in zip(layout.stored, layout.chunks, strict=True)]
    found = 0
    for place, lacking in objects.items():
        here = tuple(
            slice(max(0, low - p * m), max(0, min(m, high - p * m)))
            for p, m, (low, high) in zip(place, per_object, limits, strict=True)
        )
        lacks = np.ones(per_object, np.bool_) if lacking is None else lacking
        found += int(np.count_nonzero(lacks[here]))
    return found, (limits[0][1] - limits[0][0]) * n_parts(layout.shape[1:], layout.chunks[1:])
