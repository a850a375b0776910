"""EM with partial E-steps: the problem, the task of a chunk, the iteration loop and its state."""

from emtau_dask.em.compiling import COMPILES, check_compiler, compile_ahead, compile_setting, worth_compiling
from emtau_dask.em.estep_task import EStepItem
from emtau_dask.em.history import FitHistory, IterationRecord, frame_of
from emtau_dask.em.loop import iterate
from emtau_dask.em.observer import FitObserver, SilentObserver
from emtau_dask.em.pass_sums import FrozenRows
from emtau_dask.em.predict import (
    ENTROPIES,
    LABELS,
    LOG_LIKELIHOODS,
    RESPONSIBILITIES,
    Scoring,
    conditional_means,
    imputation,
    inliers,
    kernels_to_score,
    score_chunk,
    score_rows,
)
from emtau_dask.em.problem import (
    SCAN_ROWS,
    Context,
    Problem,
    WeightsTask,
    check_counts,
    chunk_costs,
    first_unusable_row_named,
    make_problem,
)
from emtau_dask.em.settings import RUNS_EACH, Climbing, EmSettings
from emtau_dask.em.state import Cycle, FitState, KMeansProgress, Progress, RunState

__all__ = [
    "COMPILES",
    "ENTROPIES",
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
    "WeightsTask",
    "check_compiler",
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
    "kernels_to_score",
    "make_problem",
    "score_chunk",
    "score_rows",
    "worth_compiling",
]
