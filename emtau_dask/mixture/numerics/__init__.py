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
    covariance_factors,
    covariance_of_factor,
    factor_of_precision,
    factorise_upper,
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
from emtau_dask.mixture.numerics.triangles import Triangles, mirror_squares, strips_of, write_mirrored

__all__ = [
    "EPS",
    "FEW_FEATURES",
    "AnyArray",
    "Bools",
    "Floats",
    "Ints",
    "Step",
    "Triangles",
    "add_squares",
    "check_variances",
    "cholesky_factors",
    "covariance_factors",
    "covariance_of_factor",
    "factor_of_precision",
    "factorise_upper",
    "hashed_uniforms",
    "invert_upper",
    "mirror_squares",
    "perform",
    "precision_factors",
    "product",
    "read_only",
    "read_only_copy",
    "room_for_rows",
    "squared_length",
    "squares",
    "strips_of",
    "summed_product",
    "symmetrised",
    "times_upper",
    "upper_inverse",
    "upper_product",
    "upper_solution",
    "write_mirrored",
]
