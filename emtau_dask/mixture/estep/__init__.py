"""The E-step over blocks of rows by calls of NumPy, and the plan that says by which arithmetic."""

from emtau_dask.mixture.estep.block_kernel import Accumulated, BlockKernel, MostProbable, ScoredBlock
from emtau_dask.mixture.estep.joint import NEGLIGIBLE
from emtau_dask.mixture.estep.moments import MomentSums, RowSums, SumsMerger, merge_sums, size_of, views_of
from emtau_dask.mixture.estep.patterns import LONGER, PATTERNS_BYTES, Observed, PatternKernels
from emtau_dask.mixture.estep.plan import (
    BLOCK_BYTES,
    DOUBLE,
    MAX_BLOCK_ROWS,
    MERGED_ROWS,
    Form,
    KernelPlan,
    block_bytes,
    block_rows,
    even_length,
    form_of,
    group_rows,
    longest_block,
    near_rows,
    plan_kernel,
    plan_tiles,
)
from emtau_dask.mixture.estep.reach import ROUNDING, Reach
from emtau_dask.mixture.estep.responsibilities import LEAST_EXPONENT

__all__ = [
    "BLOCK_BYTES",
    "DOUBLE",
    "LEAST_EXPONENT",
    "LONGER",
    "MAX_BLOCK_ROWS",
    "MERGED_ROWS",
    "NEGLIGIBLE",
    "PATTERNS_BYTES",
    "ROUNDING",
    "Accumulated",
    "BlockKernel",
    "Form",
    "KernelPlan",
    "MomentSums",
    "MostProbable",
    "Observed",
    "PatternKernels",
    "Reach",
    "RowSums",
    "ScoredBlock",
    "SumsMerger",
    "block_bytes",
    "block_rows",
    "even_length",
    "form_of",
    "group_rows",
    "longest_block",
    "merge_sums",
    "near_rows",
    "plan_kernel",
    "plan_tiles",
    "size_of",
    "views_of",
]
