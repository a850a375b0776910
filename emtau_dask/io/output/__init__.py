"""Results: zarr groups and pages that appear at their place complete, or not at all."""

from emtau_dask.io.output.pages import refuse_existing_page, run_of_page, write_page
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
    "refuse_existing_page",
    "replacing",
    "run_of_page",
    "run_that_wrote",
    "write_page",
]
