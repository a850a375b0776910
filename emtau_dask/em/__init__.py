"""EM with partial E-steps: the problem, the task of a chunk, the iteration loop and its state."""

from emtau_dask.em.compiling import COMPILES, compile_ahead, compile_setting, worth_compiling
from emtau_dask.em.context import Context
from emtau_dask.em.estep_task import EStepItem, FrozenRows
from emtau_dask.em.history import FitHistory, IterationRecord, frame_of
from emtau_dask.em.loop import iterate
from emtau_dask.em.observer import FitObserver, SilentObserver
from emtau_dask.em.predict import (
    LABELS,
    LOG_LIKELIHOODS,
    RESPONSIBILITIES,
    Scoring,
    conditional_means,
    imputation,
    inliers,
    score_chunk,
)
from emtau_dask.em.problem import (
    SCAN_ROWS,
    Problem,
    check_counts,
    chunk_costs,
    first_unusable_row_named,
    make_problem,
)
from emtau_dask.em.settings import RUNS_EACH, Climbing, EmSettings
from emtau_dask.em.state import Cycle, FitState, KMeansProgress, Progress, RunState

__all__ = [
    "COMPILES",
    "LABELS",
    "LOG_LIKELIHOODS",
    "RESPONSIBILITIES",
    "RUNS_EACH",
    "SCAN_ROWS",
    "Climbing",
    "Context",
    "Cycle",
    "EStepItem",
    "EmSettings",
    "FitHistory",
    "FitObserver",
    "FitState",
    "FrozenRows",
    "IterationRecord",
    "KMeansProgress",
    "Problem",
    "Progress",
    "RunState",
    "Scoring",
    "SilentObserver",
    "check_counts",
    "chunk_costs",
    "compile_ahead",
    "compile_setting",
    "conditional_means",
    "first_unusable_row_named",
    "frame_of",
    "imputation",
    "inliers",
    "iterate",
    "make_problem",
    "score_chunk",
    "worth_compiling",
]
