"""Starts: Θ₀ by k-means, by seeds, or from given responsibilities."""

from emtau_dask.init.assignment import NearestCentre
from emtau_dask.init.kmeans import forget, lloyd
from emtau_dask.init.methods import (
    KMEANS_PASSES,
    STARTS,
    GivenParameters,
    StartRequest,
    check_responsibilities_shape,
    complete_problem,
    start_from_responsibilities,
    starting_parameters,
    starting_problem,
)
from emtau_dask.init.sampling import sample_rows, sample_size, sampled_rows

__all__ = [
    "KMEANS_PASSES",
    "STARTS",
    "GivenParameters",
    "NearestCentre",
    "StartRequest",
    "check_responsibilities_shape",
    "complete_problem",
    "forget",
    "lloyd",
    "sample_rows",
    "sample_size",
    "sampled_rows",
    "start_from_responsibilities",
    "starting_parameters",
    "starting_problem",
]
