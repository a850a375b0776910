"""Several observers of one fit."""

from __future__ import annotations

from emtau_dask.em import FitObserver, IterationRecord
from emtau_dask.mixture.model import MixtureParameters


class Observers:
    """Tells each of several observers, in order."""

    def __init__(self, *observers: FitObserver) -> None:
        self._observers = observers

    def stage(self, name: str, chunks: int) -> None:
        """Tell of a pass."""
        for observer in self._observers:
            observer.stage(name, chunks)

    def chunks_done(self, count: int) -> None:
        """Tell of chunks."""
        for observer in self._observers:
            observer.chunks_done(count)

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Tell of an iteration."""
        for observer in self._observers:
            observer.iteration(record, parameters)

    def note(self, message: str) -> None:
        """Tell of a remark."""
        for observer in self._observers:
            observer.note(message)

    def close(self, *, done: bool) -> None:
        """Tell of the end."""
        for observer in self._observers:
            observer.close(done=done)
