"""Rows from a source of the package, and the same from someone else."""

from itertools import pairwise

import numpy as np

from emtau_dask.data.opening import as_source, open_source
from reliability.fuzz.oracle import WrongError

READ_BYTES = 2**24
"""What a read may be predicted to take for it to be done."""
MANY_ROWS = 5000


def ranges_of(source):
    """Return the row ranges of all chunks; of a long array, of the first and the last."""
    n_rows, chunks = source.shape[0], source.chunk_rows
    if n_rows > MANY_ROWS or len(chunks) > MANY_ROWS:
        return [(0, chunks[0]), (n_rows - chunks[-1], n_rows)]
    ends = np.cumsum([0, *chunks], dtype=np.int64).tolist()
    return list(pairwise(ends))


def read_like(case, path, independent, *, exact=True):
    """Open and read ``path`` as a fit would, and compare with what ``independent`` gives.

    Parameters
    ----------
    case : Case
    path : Path
    independent : callable
        Given the case, it returns an array-like of the same rows, read in another way.
    exact : bool
        Whether the other reader knows the type of each part.

    Returns
    -------
    str
        "right", or "described" where the rows are too many to be read here.
    """
    source = as_source(open_source(str(path)), ndim=2, what="X")
    if sum(source.chunk_rows[:MANY_ROWS]) > source.shape[0]:
        raise WrongError(f"chunks {source.chunk_rows[:5]}… of {source.shape[0]} rows")
    read, what = [], "right"
    for start, stop in ranges_of(source):
        predicted = source.ranges.peak_bytes(start, stop)
        if predicted > READ_BYTES:
            what = "described"
            continue
        case.allowed = max(case.allowed, case.allowed + predicted)
        rows = source.ranges.read(start, stop).values
        if rows.shape != (stop - start, *source.shape[1:]):
            raise WrongError(f"rows {start} to {stop} have shape {rows.shape}")
        read.append((start, stop, rows))
    if what == "right" or exact:
        same(case, read, source, independent, exact)
    return what


def same(case, read, source, independent, exact):
    """Compare rows with those of another reader, which may say what it will of the rest."""
    try:
        other = independent(case)
        if tuple(other.shape) != source.shape:
            raise WrongError(f"shape {source.shape}, another reader has {tuple(other.shape)}")
        pairs = [(rows, np.asarray(other[start:stop])) for start, stop, rows in read]
    except WrongError:
        raise
    except Exception as error:
        if not source.shape[0]:
            return  # of no rows nothing is decoded, which the other reader may find wanting
        raise WrongError(f"read, but another reader says {type(error).__name__}: {error}"[:300]) from error
    for (start, stop, _), (rows, expected) in zip(read, pairs, strict=True):
        if exact and rows.dtype != expected.dtype:
            raise WrongError(f"rows {start} to {stop} are {rows.dtype}, another reader has {expected.dtype}")
        if not np.array_equal(rows, expected, equal_nan=expected.dtype.kind == "f"):
            raise WrongError(
                f"rows {start} to {stop} differ from another reader's: {rows[:2]} {expected[:2]}"[:300]
            )
