"""What the passes of a fit use beside rows and parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from emtau_dask.em.observer import FitObserver, SilentObserver
from emtau_dask.em.positions import Positions
from emtau_dask.io.cache import RowCache


@dataclass(frozen=True, eq=False)
class Context:
    """What belongs to a fit while it goes on, and ends with it; `fit.open_context` makes one.

    Attributes
    ----------
    observer : FitObserver
    cache : RowCache or None
        Where row state and active rows are kept between passes; None where they are not.
    read_ahead : int
        Bytes that a pass may hold read ahead.
    positions : Positions
    """

    observer: FitObserver = field(default_factory=SilentObserver)
    cache: RowCache | None = None
    read_ahead: int = 0
    positions: Positions = field(default_factory=Positions)
