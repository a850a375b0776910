"""What a checkpoint remembers of the data, so that it is never gone on with on other data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.engine.manifest import SourceEntry
from emtau_dask.engine.observer import FitObserver
from emtau_dask.engine.passes import run_pass
from emtau_dask.errors import CheckpointMismatchError
from emtau_dask.storage import ChunkPlace, ChunkReader, Source, places_of

__all__ = ["Fingerprint", "check_same", "fingerprint", "fingerprint_of", "sampled", "source_entry"]

SAMPLED_CHUNKS = 16
SAMPLED_ROWS = 256
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
    sha256 : str
        Of sampled rows.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[tuple[int, int], ...]
    sha256: str

    @property
    def chunk_rows(self) -> tuple[int, ...]:
        """Rows of each chunk."""
        return tuple(rows for rows, count in self.chunks for _ in range(count))


@dataclass(frozen=True)
class _SampleTask:
    reader: ChunkReader

    def __call__(self, place: ChunkPlace, blocks: Sequence[NDArray[Any]]) -> dict[int, str]:
        values, _ = self.reader.load(place, blocks)
        wanted = np.unique(np.linspace(0, place.n_rows - 1, SAMPLED_ROWS).astype(np.intp))
        sample = np.ascontiguousarray(np.asarray(values)[wanted])
        return {place.chunk: hashlib.sha256(sample.tobytes()).hexdigest()}


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


def fingerprint(source: Source, what: str, observer: FitObserver) -> Fingerprint:
    """Return the fingerprint of a source; reads the chunks that are `sampled`, 256 rows of each.

    Parameters
    ----------
    source : Source
    what : str
        Its name, for the observer.
    observer : FitObserver
    """
    items = sampled(source)
    digests = run_pass(
        _SampleTask(source.reader()),
        partial(reduce, _join),
        [source],
        items,
        name="fingerprint",
        stage=f"fingerprint of {what}",
        observer=observer,
        costs={chunk: float(place.n_rows) for chunk, place in items.items()},
    )
    together = "".join(f"{chunk}:{text};" for chunk, text in sorted((digests or {}).items()))
    return Fingerprint(
        tuple(int(size) for size in source.shape),
        source.dtype.str,
        tuple((int(rows), len(list(run))) for rows, run in groupby(source.chunk_rows)),
        hashlib.sha256(together.encode()).hexdigest(),
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
    if saved.sha256 != found.sha256:
        raise CheckpointMismatchError(
            f"{what} holds other values than in the checkpointed run: sampled rows have the SHA-256 "
            f"{found.sha256[:12]}…, then {saved.sha256[:12]}…. Give the same data."
        )


def _shortened(chunks: tuple[tuple[int, int], ...]) -> str:
    shown = ", ".join(f"({rows}, {count})" for rows, count in chunks[:8])
    if len(chunks) <= 8:
        return shown
    rest = hashlib.sha256(repr(chunks).encode()).hexdigest()[:12]
    return f"{shown}, … in {len(chunks)} runs (SHA-256 {rest})"


def source_entry(fingerprint: Fingerprint) -> SourceEntry:
    """Return a fingerprint as a manifest has it."""
    return SourceEntry(
        shape=list(fingerprint.shape),
        dtype=fingerprint.dtype,
        chunks=[list(run) for run in fingerprint.chunks],
        sha256=fingerprint.sha256,
    )


def fingerprint_of(entry: SourceEntry | None) -> Fingerprint | None:
    """Return what `source_entry` turned into an entry."""
    if entry is None:
        return None
    chunks = tuple((rows, count) for rows, count in entry.chunks)
    return Fingerprint(tuple(entry.shape), entry.dtype, chunks, entry.sha256)
