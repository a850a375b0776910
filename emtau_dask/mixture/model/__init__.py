"""Mixture parameters, sufficient statistics, and the M-step from these to those."""

from emtau_dask.mixture.model.conditioning import Conditioning
from emtau_dask.mixture.model.parameters import (
    MixtureParameters,
    check_means,
    check_precisions,
    check_weights,
    expected_log_density,
    free_parameters,
    m_step,
    most_probable,
    tempered,
)
from emtau_dask.mixture.model.statistics import (
    Merger,
    PairwiseMerger,
    SufficientStatistics,
    block_statistics,
    group_statistics,
    merge,
    merged,
    quotients,
    remainder,
    spread_out,
    tile_rows,
    zero,
)

__all__ = [
    "Conditioning",
    "Merger",
    "MixtureParameters",
    "PairwiseMerger",
    "SufficientStatistics",
    "block_statistics",
    "check_means",
    "check_precisions",
    "check_weights",
    "expected_log_density",
    "free_parameters",
    "group_statistics",
    "m_step",
    "merge",
    "merged",
    "most_probable",
    "quotients",
    "remainder",
    "spread_out",
    "tempered",
    "tile_rows",
    "zero",
]
