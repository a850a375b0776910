"""The E-step over blocks of rows by compiled loops, where numba is installed."""

from emtau_dask.mixture.compiled.first_use import compile_loops
from emtau_dask.mixture.compiled.tiles import (
    Kernels,
    RowKernels,
    Scorer,
    scoring_kernels,
    why_not_compiled,
)

__all__ = [
    "Kernels",
    "RowKernels",
    "Scorer",
    "compile_loops",
    "scoring_kernels",
    "why_not_compiled",
]
