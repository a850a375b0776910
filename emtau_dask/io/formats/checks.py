"""Checks of dtypes, shapes, chunks and values that sources share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.errors import InvalidDataError, InvalidDtypeError

CHUNK_BYTES = 2**24
MAX_CHUNKS = 2**20
"""The most chunks that are read; a fit keeps some hundred bytes for each."""


def check_dtype(dtype: np.dtype[Any], what: str) -> None:
    """Raise `InvalidDtypeError` unless ``dtype`` is real numbers of at most 8 bytes."""
    if dtype.kind not in "fiub":
        raise InvalidDtypeError(
            f"{what} has dtype {dtype}: argument must be real numbers (floating, integer or bool), not "
            f"a string, object or complex number. Convert it, for example with .astype('float64')."
        )
    if dtype.itemsize > 8:
        raise InvalidDtypeError(
            f"{what} has dtype {dtype} of {dtype.itemsize} bytes; at most float64 (8 bytes) is used. "
            "Convert it with .astype('float64')."
        )


def check_shape(shape: tuple[int, ...], ndim: int, what: str) -> None:
    """Raise `InvalidDataError` unless ``shape`` has ``ndim`` axes and at least one column."""
    if len(shape) != ndim:
        wanted, remedy = "one value a row", "array.ravel()"
        if ndim == 2:
            wanted, remedy = "rows x features", "array.reshape(-1, 1) for a single feature"
        raise InvalidDataError(
            f"{what} has shape {tuple(shape)} ({len(shape)} axes); expected {ndim} ({wanted}). "
            f"Reshape your data, for example with {remedy}."
        )
    if ndim == 2 and shape[1] == 0:
        raise InvalidDataError(
            f"{what} has 0 feature(s) (shape={tuple(shape)}) while a minimum of 1 is required."
        )


def even_chunks(n_rows: int, row_bytes: int, what: str) -> tuple[int, ...]:
    """Return row counts of chunks of at most 16 MiB each, the last one shorter; see `equal_chunks`."""
    return equal_chunks(n_rows, max(1, CHUNK_BYTES // max(row_bytes, 1)), what)


def equal_chunks(n_rows: int, chunk_rows: int, what: str) -> tuple[int, ...]:
    """Return row counts of chunks of ``chunk_rows`` rows each, the last one shorter.

    Raises
    ------
    InvalidDataError
        There are more than 1,048,576.
    """
    if -(-n_rows // chunk_rows) > MAX_CHUNKS:
        raise InvalidDataError(
            f"{what} has {n_rows:,} rows in chunks of {chunk_rows:,}; at most {MAX_CHUNKS:,} chunks are "
            "read. Write it again with more rows in a chunk."
        )
    return tuple(min(chunk_rows, n_rows - start) for start in range(0, n_rows, chunk_rows))


def describe_bad_value(values: NDArray[np.float64], limit: float) -> tuple[int, int, str]:
    """Return the row and the feature of the first bad value, and a text that describes it.

    At least one of the ``values``, of shape (n, d), must be bad: NaN, or above ``limit`` in magnitude.
    """
    bad = ~(np.abs(values) <= limit)
    position, feature = divmod(int(np.argmax(bad)), values.shape[1])
    value = values[position, feature]
    name = "NaN" if math.isnan(value) else f"infinity ({value})" if math.isinf(value) else f"{value:.3g}"
    return position, feature, f"{name} (feature {feature})"
