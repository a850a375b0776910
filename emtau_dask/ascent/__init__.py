"""Steps that end where EM ends, after fewer passes: signed moments, and quasi-Newton steps of them."""

from emtau_dask.ascent.decrement import Decrement, jacobian_of, newton_decrement
from emtau_dask.ascent.held import HeldMoments
from emtau_dask.ascent.moments import MomentSpace
from emtau_dask.ascent.quasi_newton import (
    REFUSABLE,
    Ascent,
    Climb,
    Kind,
    Maximiser,
    Pair,
    Point,
    Trial,
    begin_cycle,
    climb,
    end_cycle,
    memory_for,
    rounding,
)

__all__ = [
    "REFUSABLE",
    "Ascent",
    "Climb",
    "Decrement",
    "HeldMoments",
    "Kind",
    "Maximiser",
    "MomentSpace",
    "Pair",
    "Point",
    "Trial",
    "begin_cycle",
    "climb",
    "end_cycle",
    "jacobian_of",
    "memory_for",
    "newton_decrement",
    "rounding",
]
