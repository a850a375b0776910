"""Fingerprints of the data in a checkpoint, so that no run is resumed on other data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from hashlib import sha256
from itertools import chain, groupby
from typing import Any

from numpy.typing import NDArray

from emtau_dask.checkpoint.manifest import SourceEntry
from emtau_dask.data.chunk import ChunkDigest, chunk_digest
from emtau_dask.data.source import ChunkRange, ChunkReader, Source, chunk_ranges
from emtau_dask.errors import CheckpointMismatchError
from emtau_dask.execution.executor import Executor, MapReduce, PassObserver

MAX_SAMPLED_CHUNKS = 16
MAX_SAMPLED_BYTES, SAMPLED_DIVISOR = 2**26, 20
"""Maximum bytes of the sampled chunks if these are several: 64 MiB, or a twentieth of all if that is more."""
MAX_SHOWN_CHUNKS = 8
"""Maximum number of runs of equal chunks that a message lists."""


def _chunk_digest(
    source: str, reader: ChunkReader, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]
) -> tuple[ChunkDigest, ...]:
    return (chunk_digest(source, chunk_range.chunk, reader.load(chunk_range, blocks)),)


def sampled(source: Source) -> dict[int, ChunkRange]:
    """Return the chunks to sample: at most 16 of the chunks with rows, evenly spaced.

    There is at least one, and no more than may be read if all chunks had the mean length.
    """
    ranges = list(chunk_ranges(source.chunk_rows).values())
    if not ranges:
        return {}
    all_bytes = math.prod(source.shape) * source.dtype.itemsize
    allowed = max(MAX_SAMPLED_BYTES, all_bytes // SAMPLED_DIVISOR) * len(ranges) // max(1, all_bytes)
    count = max(1, min(MAX_SAMPLED_CHUNKS, len(ranges), allowed))
    picked = (ranges[(2 * i + 1) * len(ranges) // (2 * count)] for i in range(count))
    return {chunk_range.chunk: chunk_range for chunk_range in picked}


def fingerprint(source: Source) -> SourceEntry:
    """Return the fingerprint of a source without its values, which are not read."""
    return SourceEntry(
        shape=tuple(int(size) for size in source.shape),
        dtype=source.dtype.str,
        chunks=tuple((int(rows), len(list(run))) for rows, run in groupby(source.chunk_rows)),
    )


def sampled_digests(
    source: Source, what: str, executor: Executor, observer: PassObserver
) -> tuple[ChunkDigest, ...]:
    """Read the chunks of `sampled` of a source, and return their digests; messages call it ``what``."""
    items = sampled(source)
    work = MapReduce(
        partial(_chunk_digest, what, source.reader()),
        _joined,
        [source],
        items,
        name="fingerprint",
        stage=f"fingerprint of {what}",
        costs={chunk: float(chunk_range.n_rows) for chunk, chunk_range in items.items()},
    )
    return executor.map_reduce(work, observer) or ()


def _joined(parts: Iterable[tuple[ChunkDigest, ...]]) -> tuple[ChunkDigest, ...]:
    return tuple(chain.from_iterable(parts))


def check_same(what: str, saved: SourceEntry | None, found: SourceEntry | None) -> None:
    """Raise `CheckpointMismatchError`, which names both sides, unless both fingerprints are the same."""
    if saved is None or found is None:
        if saved is not found:
            sides = "this call", "the checkpointed run"
            with_it, without = sides if saved is None else reversed(sides)
            raise CheckpointMismatchError(f"{with_it} has {what}, {without} has none. Give both the same.")
        return
    for aspect, theirs, ours in (
        ("shape", saved.shape, found.shape),
        ("dtype", saved.dtype, found.dtype),
        ("chunks (rows, count)", _shortened(saved.chunks), _shortened(found.chunks)),
    ):
        if theirs != ours:
            raise CheckpointMismatchError(
                f"{what} has the {aspect} {ours}; the checkpointed run had {theirs}. Give the same "
                "data in the same chunks."
            )


def _shortened(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(map(str, pairs[:MAX_SHOWN_CHUNKS]))
    if len(pairs) <= MAX_SHOWN_CHUNKS:
        return shown
    rest = sha256(repr(pairs).encode()).hexdigest()[:12]
    return f"{shown}, … in {len(pairs)} runs (SHA-256 {rest})"
