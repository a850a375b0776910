"""How a fit reports its progress."""

from __future__ import annotations

from typing import Protocol

from emtau_dask.em.history import IterationRecord
from emtau_dask.execution import PassObserver
from emtau_dask.mixture.model import MixtureParameters


class FitObserver(PassObserver, Protocol):
    """Is notified of every pass, chunk and iteration; must not raise."""

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """An iteration is complete; ``parameters`` are those of its M-step."""
        ...

    def note(self, message: str) -> None:
        """Something the user should know happened."""
        ...

    def close(self, *, done: bool) -> None:
        """The fit is over; ``done`` says whether it came to its end, or failed or was stopped."""
        ...


class SilentObserver:
    """Ignores all that it is notified of."""

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
