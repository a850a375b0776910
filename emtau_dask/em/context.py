"""What the passes of a fit need besides rows and parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from emtau_dask.em.observer import FitObserver, SilentObserver
from emtau_dask.io.cache import RowCache
from emtau_dask.rows import Positions


@dataclass(frozen=True, eq=False)
class Context:
    """What belongs to a process while a fit lasts, see `fit.open_context`; ``read_ahead`` is in bytes."""

    observer: FitObserver = field(default_factory=SilentObserver)
    cache: RowCache | None = None
    read_ahead: int = 0
    positions: Positions = field(default_factory=Positions)
