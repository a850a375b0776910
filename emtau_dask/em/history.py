"""What a fit did, iteration by iteration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload


@dataclass(frozen=True)
class IterationRecord:
    """One iteration.

    Attributes
    ----------
    iteration : int
        1-based.
    lower_bound : float
        After its E-step, before its M-step; nats per (weighted) row.
    active_rows : int
        Rows scored.
    full_pass : bool
        Whether that was every row.
    chunks_processed, chunks_skipped : int
        Chunks that hold rows, by whether they had a task.
    bytes_read : int
        Stored bytes for addressable sources, decoded bytes for graphs, and the
        bytes of files in which active rows were cached; 0 for those in memory.
        Of both passes where the first lost too many digits and was repeated.
    seconds : float
        Wall-clock time.
    rows : int
        Rows of positive weight in the data.
    """

    iteration: int
    lower_bound: float
    active_rows: int
    full_pass: bool
    chunks_processed: int
    chunks_skipped: int
    bytes_read: int
    seconds: float
    rows: int


@dataclass(frozen=True)
class FitHistory(Sequence[IterationRecord]):
    """The records of a fit, in order.

    Attributes
    ----------
    records : tuple of IterationRecord
    notes : tuple of str
        What is worth knowing of how the fit went: a resume on another kind of
        CPU, workers that differ, a damaged commit that was passed over.
    """

    records: tuple[IterationRecord, ...] = ()
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> IterationRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[IterationRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> IterationRecord | tuple[IterationRecord, ...]:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Iterator[IterationRecord]:
        return iter(self.records)

    @property
    def work(self) -> float:
        """Sum of the iterations' active fractions; 1 is one pass over the data."""
        return sum(record.active_rows / record.rows for record in self.records)
