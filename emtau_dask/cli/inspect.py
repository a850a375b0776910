"""What a checkpoint or a model holds, as tables."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.table import Table

from emtau_dask.checkpoint.manifest import Manifest
from emtau_dask.checkpoint.state import CONFIG
from emtau_dask.cli.console import text_table
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.state import FitState
from emtau_dask.errors import InvalidDataError, masked_values, one_line, shown
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.model_file import FORMAT as MODEL_FORMAT
from emtau_dask.estimator.resuming import open_saved
from emtau_dask.estimator.summary import component_texts, gap_text, stop_text
from emtau_dask.storage.commits import FORMAT, VERSION
from emtau_dask.storage.locations import OWN_GROUPS, kind_of
from emtau_dask.storage.urls import is_url
from emtau_dask.storage.zarr_check import own_group

LAST_ITERATIONS = 10
WORDS = ("algorithm", "tol", "n_init", "acceleration")
"""Settings that may be given in words, or as None."""
MODEL, CHECKPOINT = OWN_GROUPS[MODEL_FORMAT], OWN_GROUPS[FORMAT]


def component_table(model: GaussianMixture, label_counts: NDArray[np.int64] | None) -> Table:
    """Return a table of a fitted model's components; of more than 40 the heaviest, in descending order.

    ``label_counts`` (K,) are the rows that each component labels; without them that column is left out.
    """
    texts = component_texts(model.summary())
    weight, *values = texts.headings
    counted = [] if label_counts is None else ["rows"]
    table = Table(title=texts.title, caption=texts.omitted)
    for heading in ("#", weight, *counted, *values):
        table.add_column(heading, justify="right")
    for number, (weight, *values) in texts.texts.items():
        counted = [] if label_counts is None else [f"{label_counts[number]:,}"]
        table.add_row(str(number), weight, *counted, *values)
    return table


def fit_table(model: GaussianMixture, data: str, rows: int) -> Table:
    """Return a table of how the fit of a model went; ``data`` says what was fitted, ``rows`` is N."""
    history = model.history_
    seconds = sum(record.seconds for record in history)
    read = sum(record.bytes_read for record in history)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row("data", data)
    table.add_row("stopped", stop_text(model.stop_reason_))
    table.add_row("iterations", f"{model.n_iter_:,}")
    table.add_row("work", f"{history.work:.4g} passes over {rows:,} rows")
    table.add_row("lower bound", f"{model.lower_bound_:.9g} nats per row")
    table.add_row("estimated gap", gap_text(model.gap_))
    table.add_row("iterating took", f"{seconds:.3g} s, {read / 1e6:,.1f} MB read")
    return table


@dataclass(frozen=True, eq=False)
class Inspected:
    """What is at a place: plain values for JSON, and tables for people."""

    values: dict[str, Any]
    tables: tuple[Table, ...]


def inspected(place: str) -> Inspected:
    """Return what is at a path or URL, after verifying all of it.

    Raises `CheckpointError` if no commit of a checkpoint is whole, `InvalidDataError` for a damaged model,
    and for anything else, which is named.
    """
    kind = _kind(place)
    if kind == MODEL:
        model = GaussianMixture.load(place)
        return Inspected(_of_model(place, model), (_model_table(place, model), component_table(model, None)))
    if kind is not None and kind != CHECKPOINT:
        raise InvalidDataError(
            f"{place} is {kind}, not a checkpoint or a model. Give the path of one; rows to fit are named by "
            "data.path in a config."
        )
    described = inspect_run(place)
    tables = (run_table(described), *([history_table(described)] if described["history"] else []))
    return Inspected(described, tables)


def _kind(place: str) -> str | None:
    """Return what is at a path or URL, None if that does not say."""
    if not is_url(place):
        return kind_of(place)
    try:
        group = own_group(place)
    except InvalidDataError:
        return None
    return MODEL if group is not None and group.attributes.get("format") == MODEL_FORMAT else None


def _of_model(place: str, model: GaussianMixture) -> dict[str, Any]:
    names = getattr(model, "feature_names_in_", None)
    return {
        "location": shown(place),
        "format": MODEL_FORMAT,
        "covariance_type": model.parameters_.covariance_type,
        "n_components": len(model.weights_),
        "n_features": model.n_features_in_,
        "feature_names": None if names is None else [str(name) for name in names],
        "iteration": model.n_iter_,
        "lower_bound": _known(model.lower_bound_),
        "gap": _known(model.gap_),
        "stop_reason": model.stop_reason_,
        "weights": model.weights_.tolist(),
        "means": model.means_.tolist(),
        "covariances": model.covariances_.tolist(),
        "history": [_plain(record) for record in model.history_],
    }


def _model_table(place: str, model: GaussianMixture) -> Table:
    names = getattr(model, "feature_names_in_", None)
    lines = {
        "mixture": f"{len(model.weights_)} components, {model.parameters_.covariance_type}",
        "features": f"{model.n_features_in_:,}" if names is None else ", ".join(map(one_line, names)),
        "iterations": f"{model.n_iter_:,}",
        "lower bound": f"{model.lower_bound_:.9g} nats per row",
        "estimated gap": gap_text(model.gap_),
        "stopped": stop_text(model.stop_reason_),
    }
    return text_table(f"model in {place}", lines)


def inspect_run(run: str) -> dict[str, Any]:
    """Return what the newest whole commit of a run (a path or URL) says, as plain values for JSON.

    Every object that the commit refers to is verified. Raises `CheckpointError`.
    """
    saved = open_saved(run)
    manifest, state = saved.manifest, saved.state
    config, data = manifest.config, manifest.data
    current = state.current or state.best
    last = None if current is None else current.history.last_kept
    rows = data.shape[0]
    return {
        "location": saved.log.objects.location,
        "format": FORMAT,
        "version": VERSION,
        "run": manifest.run,
        "commit": saved.number,
        "written": manifest.written,
        "damaged": list(saved.passed_over),
        "stage": "finished" if state.finished else "iterating" if state.current else "starting",
        "start": state.run + 1,
        "starts": len(config.seeds),
        "iteration": 0 if current is None else current.iteration,
        "lower_bound": current.lower_bound if current is not None and current.records else None,
        "gap": None if last is None else _known(last.gap),
        "active_rows": _active_rows(state, rows),
        "rows": rows,
        "stop_reason": None if current is None else current.stop_reason,
        "notes": [shown(note) for note in state.notes],
        "environment": dict(manifest.environment),
        "config": _of_config(manifest),
        "run_config": masked_values(manifest.run_config),
        "data": dataclasses.asdict(data),
        "history": [] if current is None else [_plain(record) for record in current.records],
    }


def _of_config(manifest: Manifest) -> dict[str, Any]:
    """Return the settings of a run, what they came to in the place of words; these are in ``unresolved``."""
    plain: dict[str, Any] = CONFIG.encode(manifest.config, None)
    asked: dict[str, Any] = plain.pop("settings")
    words = {name: asked[name] for name in WORDS if asked[name] is None or isinstance(asked[name], str)}
    found = {"n_features": manifest.data.shape[1], "n_init": len(manifest.config.seeds), "unresolved": words}
    return asked | plain | found | {"feature_names": manifest.feature_names, "run_config": None}


def _plain(record: IterationRecord) -> dict[str, Any]:
    return dataclasses.asdict(record) | {"gap": _known(record.gap)}


def _known(value: float) -> float | None:
    """Return a number, or None for NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def _active_rows(state: FitState, rows: int) -> int:
    """Return how many rows the next iteration scores; of a full pass also those of weight 0."""
    if state.finished:
        return 0
    run = state.current
    return rows if run is None or run.full_pass_next else sum(run.n_active.values())


def run_table(described: dict[str, Any]) -> Table:
    """Return a table for people of what `inspect_run` returned."""
    config, bound = described["config"], described["lower_bound"]
    algorithm = config["algorithm"]
    parameters = ", ".join(f"{key}={value}" for key, value in algorithm["params"].items())
    automatic = "auto: " if config["unresolved"].get("algorithm") == "auto" else ""
    lines = {
        "stage": described["stage"],
        "commit": f"{described['commit']}, written {described['written']}",
        "mixture": f"{config['n_components']} components, {config['covariance_type']}",
        "algorithm": f"{automatic}{algorithm['name'] or algorithm['kind']}({parameters})",
        "data": f"{described['rows']:,} rows × {config['n_features']} features",
        "start": f"{described['start']} of {described['starts']}",
        "iteration": f"{described['iteration']} of at most {config['max_iter']}",
        "lower bound": "-" if bound is None else f"{bound:.9g} nats per row",
        "estimated gap": gap_text(described["gap"]),
        "active rows": f"{described['active_rows']:,}",
        "stop reason": described["stop_reason"] or "-",
    }
    for note in described["damaged"] + described["notes"]:
        lines[f"note {len(lines)}"] = note
    return text_table(f"run in {described['location']}", lines)


def history_table(described: dict[str, Any]) -> Table:
    """Return a table of the last iterations."""
    history = described["history"]
    table = Table(
        box=SIMPLE_HEAD, title=f"last {min(LAST_ITERATIONS, len(history))} of {len(history)} iterations"
    )
    for name in ("iteration", "lower bound", "active rows", "chunks", "bytes read", "seconds"):
        table.add_column(name, justify="right")
    for record in history[-LAST_ITERATIONS:]:
        table.add_row(
            str(record["iteration"]),
            f"{record['lower_bound']:.9g}",
            f"{record['active_rows']:,}",
            f"{record['chunks_processed']:,}/{record['chunks_processed'] + record['chunks_skipped']:,}",
            f"{record['bytes_read']:,}",
            f"{record['seconds']:.3g}",
        )
    return table
