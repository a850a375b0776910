"""The report of a fit: one page of HTML that needs nothing beside itself."""

from emtau_dask.report.page import report_page
from emtau_dask.report.subject import Subject

__all__ = ["Subject", "report_page"]
