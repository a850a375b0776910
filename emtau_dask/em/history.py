"""The records of a fit's iterations, estimates of the gap from them, and the port of observers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Protocol, overload

from emtau_dask.errors import MissingPackageError, counted, html_table, plain_table
from emtau_dask.execution.executor import PassObserver
from emtau_dask.mixture.parameters import MixtureParameters

MAX_SHOWN = 10
"""Maximum number of iterations that are shown, the last ones."""
SLOW_GAIN = 0.2
"""Convergence is slow if the gain over some passes is more than a fifth of that over as many before."""
LAGS = (2, 4, 8, 16)
"""Numbers of passes over which gains are compared."""
MAX_CORRECTION, MAX_GAINS = 10.0, 15.0
"""Maximum factor by which an estimate is corrected, and maximum estimate in gains of the last passes."""


@dataclass(frozen=True)
class IterationRecord:
    """One iteration, or one round of short runs, whose bound is that of the best run.

    Attributes
    ----------
    iteration : int
        1-based.
    lower_bound : float
        Log-likelihood per (weighted) row in nats, after its E-step, before its M-step. In a pass over a
        sample it is that of the sample; if active rows have sampling weights, it is an estimate.
    active_rows : int
        Rows scored, those of samples and starts included; more than all rows if some are scored twice, or
        if a gap is measured.
    full_pass : bool
        Whether every row was scored, so that the bound is exact.
    chunks_processed, chunks_skipped : int
        Chunks with rows that had a task, and those that had none.
    bytes_read : int
        Stored bytes for addressable sources, decoded bytes for graphs, and the
        bytes of files in which active rows were cached; 0 for those in memory.
        Of both passes if the first was repeated.
    seconds : float
        Wall-clock time.
    rows : int
        Rows of positive weight in the data.
    accepted : bool
        Whether the parameters that were scored are kept. Extrapolated ones that lower the bound are refused,
        and the fit goes on from the last accepted ones.
    gap : float
        Estimated nats per row that a stationary point lies above the bound; see ``GaussianMixture.gap_``.
        NaN if there is no estimate.
    repeated : bool
        Whether the rows were scored again because the first pass lost too many digits: a component shrank
        unexpectedly.
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
    accepted: bool = True
    gap: float = math.nan
    repeated: bool = False

    def __post_init__(self) -> None:
        if math.isnan(self.gap):  # One object for all, so that records without an estimate compare equal.
            object.__setattr__(self, "gap", math.nan)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()


def frame_of(kind: type, records: Sequence[Any], called: str) -> Any:
    """Return records of a dataclass as a pandas DataFrame: a row for each, a column for each field.

    Raises
    ------
    MissingPackageError
        pandas is not installed; the message gives the records the name ``called``.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingPackageError(
            f"{called}.to_frame() needs pandas: pip install pandas. Without it print({called}) shows them, "
            f"and list({called}) are the records."
        ) from error
    names = [field.name for field in fields(kind)]
    return pd.DataFrame({name: [getattr(record, name) for record in records] for name in names})


@dataclass(frozen=True, repr=False)
class FitHistory(Sequence[IterationRecord]):
    """The records of a fit, in order.

    Attributes
    ----------
    records : tuple of IterationRecord
    notes : tuple of str
        Remarks on how the fit went: a resume on another kind of CPU, workers that
        differ, a damaged commit that was skipped.
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

    def __repr__(self) -> str:
        last = self.last_kept
        reached = "" if last is None else f", log-likelihood per row {last.lower_bound:.9g}"
        notes = f", {counted(len(self.notes), 'note')}" if self.notes else ""
        iterations = counted(len(self), "iteration")
        return f"FitHistory({iterations}, {self.work:.4g} passes over the data{reached}{notes})"

    def __str__(self) -> str:
        return plain_table(*self._table())

    def to_frame(self) -> Any:
        """Return the records as a pandas DataFrame: a row for each iteration, which is the index.

        Raises
        ------
        MissingPackageError
            pandas is not installed.
        """
        return frame_of(IterationRecord, self.records, "history_").set_index("iteration")

    def _repr_html_(self) -> str:
        return html_table(*self._table())

    def _table(self) -> tuple[str, list[str], list[list[str]]]:
        """Return the caption, the headings and the texts of a table of the last iterations."""
        last = self.records[-MAX_SHOWN:]
        caption = f"{self!r}; the last {len(last)} of {counted(len(self), 'iteration')}"
        cells = [
            [
                f"{record.iteration}",
                f"{record.lower_bound:.9g}" + _mark(record),
                f"{record.gap:.2g}" if math.isfinite(record.gap) else "",
                f"{record.active_rows / record.rows:.3g} passes",
                f"{record.chunks_processed:,} of {record.chunks_processed + record.chunks_skipped:,}",
                f"{record.seconds:.3g}",
            ]
            for record in last
        ]
        headings = ["iteration", "log-lik./row", "could still gain", "rows scored", "chunks", "seconds"]
        return caption, headings, cells

    @property
    def last_kept(self) -> IterationRecord | None:
        """The last record; if it was refused, that of the last accepted full pass."""
        last = self.records[-1] if self.records else None
        if last is None or last.accepted:
            return last
        return next(
            (record for record in reversed(self.records) if record.full_pass and record.accepted), last
        )

    @property
    def last_change(self) -> float:
        """Change of the bound between the last two accepted full passes, nats per row.

        If there are not two, between the last two iterations; NaN if there are not two iterations.
        """
        full = [record for record in self.records if record.full_pass and record.accepted]
        last = full[-2:] if len(full) > 1 else self.records[-2:]
        return last[1].lower_bound - last[0].lower_bound if len(last) == 2 else math.nan

    @property
    def work(self) -> float:
        """Sum of the iterations' active fractions; 1 is one pass over the data."""
        return sum(record.active_rows / record.rows for record in self.records)


def _mark(record: IterationRecord) -> str:
    """Return what a reader must know of an iteration's log-likelihood."""
    return " (refused)" if not record.accepted else "" if record.full_pass else " (some rows)"


def extrapolated_gap(records: Sequence[IterationRecord]) -> float:
    """Return the distance of plain EM's bounds from their limit by Aitken's extrapolation, nats per row.

    If the last two changes of full passes are a and b, and the changes go on to fall by the same factor, the
    bounds still rise by ``b² / (a − b)``. That is too little while EM converges slowly. NaN if the last three
    passes are not full, or if the changes do not fall.
    """
    last = records[-3:]
    if len(last) < 3 or not all(record.full_pass and record.accepted for record in last):
        return math.nan
    first, second = (after.lower_bound - before.lower_bound for before, after in pairwise(last))
    return second**2 / (first - second) if 0 <= second < first else math.nan


def corrected_gap(records: Sequence[IterationRecord], gap: float, bound: float) -> float:
    """Return the estimated gap of an accepted full pass, corrected by the full passes before it.

    Quasi-Newton steps know the curvature of few directions, so the estimate is too small if others are slow.
    It is multiplied by the factor by which the last estimate was smaller than the gain that followed. It is
    at least Aitken's extrapolation of the bounds 2, 4, 8 and 16 passes apart, as long as convergence is slow.

    Parameters
    ----------
    records : sequence of IterationRecord
        Of the iterations before.
    gap : float
        As estimated from the last step alone.
    bound : float
        Of this pass; nats per row, like all bounds and gaps here.
    """
    if math.isnan(gap):
        return gap
    kept = [record for record in records if record.full_pass and record.accepted]
    if not kept:
        return gap
    bounds = [*(record.lower_bound for record in kept), bound]
    before = kept[-1].gap
    if before > 0:
        gap *= min(MAX_CORRECTION, max(1.0, (bound - kept[-1].lower_bound) / before))
    for lag in LAGS:
        if len(bounds) <= 2 * lag:
            break
        first, middle, last = bounds[-1 - 2 * lag], bounds[-1 - lag], bounds[-1]
        slow, now = middle - first, last - middle
        if now <= SLOW_GAIN * slow:
            break
        times = now / (slow - now) if slow > now else 1.0
        gap = max(gap, min(times, MAX_GAINS) * now)
    return gap


class FitObserver(PassObserver, Protocol):
    """Is notified of every part of a fit, pass, chunk and iteration; must not raise."""

    def part(self, name: str, compared: str = "") -> None:
        """A part of a fit begins, such as ``"start 3 of 8"``; the one before has ended.

        Parts one after the other that are ``compared`` have one text for the best of them.
        """
        ...

    def left_out(self) -> None:
        """The part that ends is not compared: it collapsed."""
        ...

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """An iteration is complete; ``parameters`` are those of its M-step."""
        ...

    def note(self, message: str) -> None:
        """Something happened that the user should know."""
        ...

    def close(self, *, done: bool) -> None:
        """The fit is over; ``done`` says whether it was completed, and neither failed nor was stopped."""
        ...


class SilentObserver:
    """Ignores all that it is notified of."""

    def part(self, name: str, compared: str = "") -> None:
        """Ignore."""

    def left_out(self) -> None:
        """Ignore."""

    def stage(self, name: str, chunks: int) -> None:
        """Ignore."""

    def chunks_done(self, count: int) -> None:
        """Ignore."""

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Ignore."""

    def note(self, message: str) -> None:
        """Ignore."""

    def close(self, *, done: bool) -> None:
        """Ignore."""
