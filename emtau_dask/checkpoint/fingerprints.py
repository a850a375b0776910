"""What a checkpoint remembers of the data, so that it is never gone on with on other data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from hashlib import sha256
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.checkpoint.schema import SampleEntry, SourceEntry
from emtau_dask.errors import CheckpointMismatchError
from emtau_dask.execution import Executor, Pass, PassObserver
from emtau_dask.io.sources import ChunkPlace, ChunkReader, Source, places_of, values_digest

SAMPLED_CHUNKS = 16
SAMPLED_BYTES, SAMPLED_SHARE = 2**26, 20
"""What a sample may read, beyond one chunk: 64 MiB of values, or a twentieth of them all."""


@dataclass(frozen=True)
class Fingerprint:
    """Of one source.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
    chunks : tuple of (rows, count)
        Runs of chunks of equally many rows, in order.
    samples : tuple of (chunk, str)
        Sampled chunks, and the SHA-256 of the values of each.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[int, int], ...]
    samples: tuple[tuple[int, str], ...]

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Rows of each chunk."""
        return tuple(rows for rows, count in self.chunks for _ in range(count))


@dataclass(frozen=True)
class _SampleTask:
    reader: ChunkReader

    def __call__(self, place: ChunkPlace, blocks: Sequence[NDArray[Any]]) -> dict[int, str]:
        values, _ = self.reader.load(place, blocks)
        return {place.chunk: values_digest(np.asarray(values))}


def _join(a: dict[int, str], b: dict[int, str]) -> dict[int, str]:
    return a | b


def sampled(source: Source) -> dict[int, ChunkPlace]:
    """Return which chunks are sampled: at most 16 of those that hold rows, evenly spaced.

    As many as may be read, counted as if all were of the mean length; always one.
    """
    places = list(places_of(source.chunk_rows).values())
    if not places:
        return {}
    all_bytes = math.prod(source.shape) * source.dtype.itemsize
    allowed = max(SAMPLED_BYTES, all_bytes // SAMPLED_SHARE) * len(places) // max(1, all_bytes)
    count = max(1, min(SAMPLED_CHUNKS, len(places), allowed))
    picked = (places[(2 * i + 1) * len(places) // (2 * count)] for i in range(count))
    return {place.chunk: place for place in picked}


def fingerprint(source: Source, what: str, executor: Executor, observer: PassObserver) -> Fingerprint:
    """Return the fingerprint of a source; reads the chunks that are `sampled`.

    Parameters
    ----------
    source : Source
    what : str
        Its name, for the observer.
    executor : Executor
    observer : PassObserver
    """
    items = sampled(source)
    work = Pass(
        _SampleTask(source.reader()),
        partial(reduce, _join),
        [source],
        items,
        name="fingerprint",
        stage=f"fingerprint of {what}",
        costs={chunk: float(place.n_rows) for chunk, place in items.items()},
    )
    digests = executor.map_reduce(work, observer)
    return Fingerprint(
        tuple(int(size) for size in source.shape),
        source.dtype.str,
        tuple((int(rows), len(list(run))) for rows, run in groupby(source.chunk_rows)),
        tuple(sorted((digests or {}).items())),
    )


def check_same(what: str, saved: Fingerprint | None, found: Fingerprint | None) -> None:
    """Raise `CheckpointMismatchError` unless both are the same; names both sides."""
    if saved is None or found is None:
        if saved is not found:
            with_it, without = (
                ("this call", "the checkpointed run")
                if saved is None
                else (
                    "the checkpointed run",
                    "this call",
                )
            )
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
                "data in the "
                "same chunks."
            )
    then, now, places = dict(saved.samples), dict(found.samples), places_of(found.chunk_rows)
    if then.keys() != now.keys():
        raise CheckpointMismatchError(
            f"{what} is sampled in the chunks {sorted(now)}; in the checkpointed run it was in "
            f"{sorted(then)}. Begin a new run."
        )
    for chunk, digest in now.items():
        if digest != then[chunk]:
            raise CheckpointMismatchError(
                f"{what} holds other values than in the checkpointed run: chunk {chunk} (rows "
                f"{places[chunk].start} to {places[chunk].stop}) has the SHA-256 {digest[:12]}…, then "
                f"{then[chunk][:12]}…. Give the same data, or begin a new run with this."
            )


def _shortened(chunks: tuple[tuple[int, int], ...]) -> str:
    shown = ", ".join(f"({rows}, {count})" for rows, count in chunks[:8])
    if len(chunks) <= 8:
        return shown
    rest = sha256(repr(chunks).encode()).hexdigest()[:12]
    return f"{shown}, … in {len(chunks)} runs (SHA-256 {rest})"


def source_entry(fingerprint: Fingerprint) -> SourceEntry:
    """Return a fingerprint as a manifest has it."""
    return SourceEntry(
        shape=list(fingerprint.shape),
        dtype=fingerprint.dtype,
        chunks=[list(run) for run in fingerprint.chunks],
        samples=[SampleEntry(chunk=chunk, sha256=digest) for chunk, digest in fingerprint.samples],
    )


def fingerprint_of(entry: SourceEntry | None) -> Fingerprint | None:
    """Return what `source_entry` turned into an entry."""
    if entry is None:
        return None
    chunks = tuple((rows, count) for rows, count in entry.chunks)
    samples = tuple((sample.chunk, sample.sha256) for sample in entry.samples)
    return Fingerprint(tuple(entry.shape), entry.dtype, chunks, samples)
