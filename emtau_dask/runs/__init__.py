"""What the commands of `emtau` do, from a config to results."""

from emtau_dask.runs.authority import Demand
from emtau_dask.runs.clusters import computing
from emtau_dask.runs.estimator import starting_responsibilities
from emtau_dask.runs.fit import resume_arguments, run_fit, run_plan, run_resume
from emtau_dask.runs.inputs import open_inputs
from emtau_dask.runs.inspect import inspected
from emtau_dask.runs.outputs import RunResult, result_values
from emtau_dask.runs.plan import check_memory, plan_table
from emtau_dask.runs.predict import LabelOptions, run_predict
from emtau_dask.runs.report import ReportOptions, run_report
from emtau_dask.runs.selecting import (
    SelectionRequest,
    SelectionResult,
    run_selection,
    selection_lines,
    selection_table,
    selection_values,
)
from emtau_dask.runs.tables import component_table, fit_table

__all__ = [
    "Demand",
    "LabelOptions",
    "ReportOptions",
    "RunResult",
    "SelectionRequest",
    "SelectionResult",
    "check_memory",
    "component_table",
    "computing",
    "fit_table",
    "inspected",
    "open_inputs",
    "plan_table",
    "result_values",
    "resume_arguments",
    "run_fit",
    "run_plan",
    "run_predict",
    "run_report",
    "run_resume",
    "run_selection",
    "selection_lines",
    "selection_table",
    "selection_values",
    "starting_responsibilities",
]
