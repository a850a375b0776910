"""Local files: read safely, written whole; their errors translated into words that name a remedy."""

from emtau_dask.io.files.direct import LEAST_BYTES, passes_cache, read_directly, usable_memory
from emtau_dask.io.files.errors import reason_of, remedy_of, writing_errors
from emtau_dask.io.files.exclusive import give_free_name
from emtau_dask.io.files.parallel import each
from emtau_dask.io.files.proofs import Proofs, this_process
from emtau_dask.io.files.regular import (
    check_listed,
    check_regular,
    fill,
    followed,
    fresh,
    opened_regular,
    paths_below,
    read_regular,
    stream_at,
)
from emtau_dask.io.files.reused import ReusedMemory
from emtau_dask.io.files.scratch import ScratchFolder

__all__ = [
    "LEAST_BYTES",
    "Proofs",
    "ReusedMemory",
    "ScratchFolder",
    "check_listed",
    "check_regular",
    "each",
    "fill",
    "followed",
    "fresh",
    "give_free_name",
    "opened_regular",
    "passes_cache",
    "paths_below",
    "read_directly",
    "read_regular",
    "reason_of",
    "remedy_of",
    "stream_at",
    "this_process",
    "usable_memory",
    "writing_errors",
]
