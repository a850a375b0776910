"""Arrays, matrix products, triangles and Cholesky factors that all of the mixture is computed with."""

from emtau_dask.mixture.numerics.arrays import (
    EPS,
    FEW_FEATURES,
    AnyArray,
    Bools,
    Floats,
    Ints,
    Step,
    read_only,
    read_only_copy,
    room_for_rows,
    squared_length,
    symmetrised,
)
from emtau_dask.mixture.numerics.blas import add_squares, times_upper, upper_product, upper_solution
from emtau_dask.mixture.numerics.cholesky import (
    check_variances,
    cholesky_factors,
    covariance_of_factor,
    factor_of_precision,
    invert_upper,
    precision_factors,
    upper_inverse,
)
from emtau_dask.mixture.numerics.products import (
    perform,
    product,
    squares,
    summed_product,
)
from emtau_dask.mixture.numerics.row_hash import hashed_uniforms

__all__ = [
    "EPS",
    "FEW_FEATURES",
    "AnyArray",
    "Bools",
    "Floats",
    "Ints",
    "Step",
    "add_squares",
    "check_variances",
    "cholesky_factors",
    "covariance_of_factor",
    "factor_of_precision",
    "hashed_uniforms",
    "invert_upper",
    "perform",
    "precision_factors",
    "product",
    "read_only",
    "read_only_copy",
    "room_for_rows",
    "squared_length",
    "squares",
    "summed_product",
    "symmetrised",
    "times_upper",
    "upper_inverse",
    "upper_product",
    "upper_solution",
]
