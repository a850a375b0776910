"""EM with partial E-steps: problem, task of a chunk, iteration loop and its state, a whole fit."""

from emtau_dask.em.history import FitHistory, IterationRecord

__all__ = ["FitHistory", "IterationRecord"]
