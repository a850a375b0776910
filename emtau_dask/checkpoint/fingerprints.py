"""What a checkpoint remembers of the data, so that no run is resumed on other data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from hashlib import sha256
from itertools import groupby
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.checkpoint.schema import MAX_SAMPLES, SampleEntry, SourceEntry
from emtau_dask.errors import CheckpointMismatchError
from emtau_dask.execution import Executor, Pass, PassObserver
from emtau_dask.io.sources import ChunkRange, ChunkReader, Source, chunk_ranges, values_digest

SAMPLED_BYTES, SAMPLED_SHARE = 2**26, 20
"""What a sample may read beyond one chunk: 64 MiB of values, or a twentieth of all, whichever is more."""
SHOWN_CHUNKS = 8
"""How many runs of equal chunks a message lists."""


def _digest(reader: ChunkReader, chunk_range: ChunkRange, blocks: Sequence[NDArray[Any]]) -> dict[int, str]:
    values, _ = reader.load(chunk_range, blocks)
    return {chunk_range.chunk: values_digest(np.asarray(values))}


def sampled(source: Source) -> dict[int, ChunkRange]:
    """Return the chunks to sample: at most 16 of those that hold rows, evenly spaced.

    There is at least one, and no more than may be read if all chunks had the mean length.
    """
    ranges = list(chunk_ranges(source.chunk_rows).values())
    if not ranges:
        return {}
    all_bytes = math.prod(source.shape) * source.dtype.itemsize
    allowed = max(SAMPLED_BYTES, all_bytes // SAMPLED_SHARE) * len(ranges) // max(1, all_bytes)
    count = max(1, min(MAX_SAMPLES, len(ranges), allowed))
    picked = (ranges[(2 * i + 1) * len(ranges) // (2 * count)] for i in range(count))
    return {chunk_range.chunk: chunk_range for chunk_range in picked}


def fingerprint(source: Source, what: str, executor: Executor, observer: PassObserver) -> SourceEntry:
    """Return the fingerprint of a source, called ``what`` to the observer; reads the chunks of `sampled`."""
    items = sampled(source)
    work = Pass(
        partial(_digest, source.reader()),
        partial(reduce, or_),
        [source],
        items,
        name="fingerprint",
        stage=f"fingerprint of {what}",
        costs={chunk: float(chunk_range.n_rows) for chunk, chunk_range in items.items()},
    )
    digests = executor.map_reduce(work, observer) or {}
    return SourceEntry(
        shape=[int(size) for size in source.shape],
        dtype=source.dtype.str,
        chunks=[[int(rows), len(list(run))] for rows, run in groupby(source.chunk_rows)],
        samples=[SampleEntry(chunk=chunk, sha256=digests[chunk]) for chunk in sorted(digests)],
    )


def check_same(what: str, saved: SourceEntry | None, found: SourceEntry | None) -> None:
    """Raise `CheckpointMismatchError`, which names both sides, unless both fingerprints are the same."""
    if saved is None or found is None:
        if saved is not found:
            sides = "this call", "the checkpointed run"
            with_it, without = sides if saved is None else reversed(sides)
            raise CheckpointMismatchError(f"{with_it} has {what}, {without} has none. Give both the same.")
        return
    for aspect, theirs, ours in (
        ("shape", tuple(saved.shape), tuple(found.shape)),
        ("dtype", saved.dtype, found.dtype),
        ("chunks (rows, count)", _shortened(saved.chunks), _shortened(found.chunks)),
    ):
        if theirs != ours:
            raise CheckpointMismatchError(
                f"{what} has the {aspect} {ours}; the checkpointed run had {theirs}. Give the same "
                "data in the same chunks."
            )
    then, now = ({sample.chunk: sample.sha256 for sample in side.samples} for side in (saved, found))
    if then.keys() != now.keys():
        raise CheckpointMismatchError(
            f"{what} is sampled in the chunks {sorted(now)}; in the checkpointed run it was in "
            f"{sorted(then)}. Begin a new run."
        )
    for chunk, digest in now.items():
        if digest != then[chunk]:
            chunk_rows = [rows for rows, count in found.chunks for _ in range(count)]
            start = sum(chunk_rows[:chunk])
            raise CheckpointMismatchError(
                f"{what} holds other values than in the checkpointed run: chunk {chunk} (rows "
                f"{start} to {start + chunk_rows[chunk]}) has the SHA-256 {digest[:12]}…, then "
                f"{then[chunk][:12]}…. Give the same data, or begin a new run with this."
            )


def _shortened(chunks: Sequence[Sequence[int]]) -> str:
    pairs = tuple((rows, count) for rows, count in chunks)
    shown = ", ".join(map(str, pairs[:SHOWN_CHUNKS]))
    if len(pairs) <= SHOWN_CHUNKS:
        return shown
    rest = sha256(repr(pairs).encode()).hexdigest()[:12]
    return f"{shown}, … in {len(pairs)} runs (SHA-256 {rest})"
