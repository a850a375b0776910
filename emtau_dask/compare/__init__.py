"""Several algorithms on the same data from the same start, evaluated alike."""

from emtau_dask.compare.run import run_compare

__all__ = ["run_compare"]
