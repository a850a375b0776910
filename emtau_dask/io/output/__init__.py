"""Results: zarr groups that appear at their place complete, or not at all."""

from emtau_dask.io.output.publishing import published
from emtau_dask.io.output.zarr_rows import (
    RowWriter,
    check_writable,
    mark_as_of,
    new_group,
    refuse_existing,
    replacing,
    run_that_wrote,
)

__all__ = [
    "RowWriter",
    "check_writable",
    "mark_as_of",
    "new_group",
    "published",
    "refuse_existing",
    "replacing",
    "run_that_wrote",
]
