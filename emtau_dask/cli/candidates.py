"""The candidates of a selection: a table for a terminal, values for JSON, and back from these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rich.table import Table

from emtau_dask.selection.table import CandidateRecord, SelectionTable

RESULT = "selection.json"
"""Name of the file of the candidates in the folder of the results."""
CRITERIA = {"bic": "BIC", "aic": "AIC", "icl": "ICL"}
"""Criteria and their names for people."""


def selection_table(table: SelectionTable, title: str) -> Table:
    """Return a table of candidates, ``*`` at the best; criteria are differences from the lowest."""
    result_table = Table(title=title, box=None, padding=(0, 1), collapse_padding=True, pad_edge=False)
    result_table.add_column("")
    for heading in (
        "K",
        "type",
        "p",
        "log-lik./row",
        *(f"+{name}" for name in CRITERIA.values()),
        "held out",
    ):
        result_table.add_column(heading, justify="left" if heading == "type" else "right", no_wrap=True)
    fitted = [record for record in table if math.isfinite(record.bic)]
    least = {name: min((getattr(record, name) for record in fitted), default=0.0) for name in CRITERIA}
    for number, record in enumerate(table):
        mark = "*" if number == table.best else "!" if record.reason else ""
        shape = str(record.n_components), record.covariance_type, f"{record.parameters:,}"
        values = ["-"] * (len(CRITERIA) + 2)
        if math.isfinite(record.bic):
            above = (_above(getattr(record, name) - least[name]) for name in CRITERIA)
            held_out = f"{record.held_out:.6g}" if math.isfinite(record.held_out) else "-"
            values = [f"{record.log_likelihood:.6g}", *above, held_out]
        result_table.add_row(mark, *shape, *values)
    return result_table


def _above(value: float) -> str:
    """Return a difference of criteria in at most nine characters."""
    if value < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if value < 1e7 else f"{value:.2e}"


def candidate_values(record: CandidateRecord) -> dict[str, Any]:
    """Return a candidate as values for JSON; an unknown value is None."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def table_of_values(values: Mapping[str, Any]) -> SelectionTable:
    """Return the candidates from values that `selection_values` in `cli.select` returned."""
    known: list[dict[str, Any]] = [
        {name: math.nan if value is None else value for name, value in each.items()}
        for each in values["candidates"]
    ]
    records = tuple(CandidateRecord(**each) for each in known)
    chosen = values["n_components"], values["covariance_type"]
    best = [(record.n_components, record.covariance_type) for record in records].index(chosen)
    return SelectionTable(records, values["criterion"], best)
