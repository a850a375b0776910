"""How a pass tells of its progress."""

from __future__ import annotations

from typing import Protocol


class PassObserver(Protocol):
    """Told of a pass and its chunks; must not raise."""

    def stage(self, name: str, chunks: int) -> None:
        """A pass over ``chunks`` chunks begins."""
        ...

    def chunks_done(self, count: int) -> None:
        """So many of them are done; may be called from another thread."""
        ...
