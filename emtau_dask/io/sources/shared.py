"""Rows that several processes read: each first proves that it sees the same data as the first one.

Two arrays may have equal metadata, so a few rows are compared as well. Every process does so before it
first reads, also a worker that joins late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from uuid import uuid4

import numpy as np

from emtau_dask.errors import InvalidDataError
from emtau_dask.io.files import Proofs, this_process
from emtau_dask.io.formats import Loaded, RangeReader, RangeSource, chunk_ranges
from emtau_dask.io.sources.digest import values_digest
from emtau_dask.process import of_process
from emtau_dask.versions import other_versions, software

SAMPLES = 4
SAMPLE_BYTES = 2**22
"""The most bytes of a sample, unless a single row is longer."""
HELD_BYTES = 2**28
"""The most bytes that reading all samples may take; the first sample is read in any case."""
REMEDY = "Put it where every worker sees it under the same path, or into an object store."


@dataclass(frozen=True)
class Sample:
    """Numbers of rows, and the digest of their values."""

    start: int
    stop: int
    digest: str

    @classmethod
    def of(cls, ranges: RangeReader, start: int, stop: int) -> Sample:
        """Read the rows."""
        return cls(start, stop, values_digest(ranges.read(start, stop).values).hex())


@dataclass(frozen=True)
class SharedRows(RangeReader):
    """A `RangeReader` that reads only in processes that see the same data as the one that made it.

    That process saw the identity ``seen`` and the ``samples``, with the versions ``made_with``. Users call
    the rows ``name``.
    """

    ranges: RangeReader
    name: str
    seen: str
    samples: tuple[Sample, ...]
    made_with: Mapping[str, str]
    token: str

    def read(self, start: int, stop: int) -> Loaded:
        """Prove, see `prove`, then read."""
        self.prove()
        return self.ranges.read(start, stop)

    def identity(self) -> str:
        """Return the identity of the rows."""
        return self.ranges.identity()

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return the bound of ``ranges``; the proof is not in it."""
        return self.ranges.peak_bytes(start, stop)

    def prove(self) -> None:
        """Raise `InvalidDataError` where this process sees other data, or none; a success is remembered."""
        of_process(Proofs).once(self.token, self._prove)

    def _prove(self) -> None:
        if difference := self.difference():
            raise InvalidDataError(f"{this_process()} {difference}")

    def difference(self) -> str:
        """Return how this process's data differ and the remedy, to follow its name; "" where they do not."""
        why = other_versions(software(), self.made_with)
        try:
            found = self._otherwise()
        except Exception as error:
            cause = error.__cause__ or error
            reason = f"{type(cause).__name__}: {cause}" if why else str(error)
            found = f"cannot see {self.name}: {reason.rstrip('.')}"
        return found and f"{found}. {why}{REMEDY}"

    def _otherwise(self) -> str:
        """Return how the data differ from those that were seen; "" where they do not."""
        other = f"sees other data than the process that fits as {self.name}"
        identity = self.ranges.identity()
        if identity != self.seen:
            return f"{other} ({identity}; there {self.seen})"
        for sample in self.samples:
            found = Sample.of(self.ranges, sample.start, sample.stop)
            if found != sample:
                return (
                    f"{other} (rows {sample.start} to {sample.stop} have the digest {found.digest[:12]}…; "
                    f"there {sample.digest[:12]}…)"
                )
        return ""


def shared_rows(source: RangeSource, name: str) -> SharedRows:
    """Return a reader for many processes of stored rows, which users call ``name``.

    At most four samples are read, at the beginnings of evenly spread chunks. Raises `InvalidDataError`
    where they cannot be read.
    """
    ranges, chunks = source.ranges, list(chunk_ranges(source.chunk_rows).values())
    identity = ranges.identity()
    row_bytes = max(1, source.dtype.itemsize * int(np.prod(source.shape[1:])))
    count, held = min(SAMPLES, len(chunks)), 0
    samples: list[Sample] = []
    for chunk in (chunks[(2 * i + 1) * len(chunks) // (2 * count)] for i in range(count)):
        stop = min(chunk.stop, chunk.start + max(1, SAMPLE_BYTES // row_bytes))
        held += ranges.peak_bytes(chunk.start, stop)
        if not samples or held <= HELD_BYTES:
            samples.append(Sample.of(ranges, chunk.start, stop))
    shared = SharedRows(ranges, name, identity, tuple(samples), software(), uuid4().hex)
    of_process(Proofs).settle(shared.token)
    return shared
