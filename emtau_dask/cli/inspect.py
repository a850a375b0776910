"""The contents of a checkpoint or a model, as tables and as values for JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from emtau_dask.checkpoint.manifest import Manifest
from emtau_dask.checkpoint.state import CONFIG
from emtau_dask.cli.console import text_table
from emtau_dask.em.history import IterationRecord
from emtau_dask.em.state import FitState
from emtau_dask.errors import InvalidDataError, masked_values, shown
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.model_file import FORMAT as MODEL_FORMAT
from emtau_dask.estimator.resuming import open_saved
from emtau_dask.estimator.summary import gain_text
from emtau_dask.selection.table import LEGEND, stored_selection
from emtau_dask.storage.commits import FORMAT, VERSION
from emtau_dask.storage.locations import CHECKPOINT, MODEL, fit_in, kind_of
from emtau_dask.storage.urls import is_url, plain_path
from emtau_dask.storage.zarr_check import own_group

LAST_ITERATIONS = 10
UNRESOLVED = ("algorithm", "tol", "n_init", "acceleration")
"""Settings whose text or None is resolved by the shape of the data."""


@dataclass(frozen=True, eq=False)
class Inspection:
    """The contents of a place: values for JSON, and texts and tables for people."""

    values: dict[str, Any]
    tables: tuple[str | Table, ...]


def inspect_place(place: str) -> Inspection:
    """Return the contents of a checkpoint or model at a path or URL, after verifying all of it.

    In the folder of a run of `fit` or `select` that is its model, or else its checkpoint. With the model of a
    selection comes the table of the candidates.

    Raises `CheckpointError` if every commit of a checkpoint is damaged, and `InvalidDataError` for a damaged
    model and for anything else, which the message names.
    """
    folder, place = Path(plain_path(place)), fit_in(place, MODEL, CHECKPOINT)
    kind = _kind(place)
    if kind == MODEL:
        model = GaussianMixture.load(place)
        values, texts = _selection_in(folder)
        found = f"model in {place}", str(model.summary())
        return Inspection(_model_values(place, model) | values, (*texts, *found))
    if kind is not None and kind != CHECKPOINT:
        raise InvalidDataError(
            f"{place} is {kind}, not a checkpoint or a model. Give the path of one; data.path in a config "
            "names rows to fit."
        )
    described = inspect_run(place)
    history = [history_table(described)] if described["history"] else []
    return Inspection(described, (run_table(described), *history))


def _selection_in(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return what ``select`` found, if the folder is one of its: values for JSON, and the candidates."""
    if (stored := stored_selection(folder)) is None:
        return {}, ()
    found, table = stored
    text = table.text(f"candidates of the selection in {folder}")
    return {"selection": found}, (f"{text}\n{LEGEND}",)


def _kind(place: str) -> str | None:
    """Return the kind of the data at a path or URL; None if it is unknown."""
    if not is_url(place):
        return kind_of(place)
    try:
        group = own_group(place)
    except InvalidDataError:
        return None
    return MODEL if group is not None and group.attributes.get("format") == MODEL_FORMAT else None


def _model_values(place: str, model: GaussianMixture) -> dict[str, Any]:
    names = getattr(model, "feature_names_in_", None)
    return {
        "location": shown(place),
        "format": MODEL_FORMAT,
        "covariance_type": model.parameters_.covariance_type,
        "n_components": len(model.weights_),
        "n_features": model.n_features_in_,
        "feature_names": None if names is None else [str(name) for name in names],
        "iteration": model.n_iter_,
        "lower_bound": _finite_or_none(model.lower_bound_),
        "gap": _finite_or_none(model.gap_),
        "stop_reason": model.stop_reason_,
        "weights": model.weights_.tolist(),
        "means": model.means_.tolist(),
        "covariances": model.covariances_.tolist(),
        "history": [_record_values(record) for record in model.history_],
    }


def inspect_run(run: str) -> dict[str, Any]:
    """Return the state of a run (a path or URL) in its newest undamaged commit, as values for JSON.

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
        "gap": None if last is None else _finite_or_none(last.gap),
        "active_rows": _active_rows(state, rows),
        "rows": rows,
        "stop_reason": None if current is None else current.stop_reason,
        "notes": [shown(note) for note in state.notes],
        "environment": dict(manifest.environment),
        "config": _config_values(manifest),
        "run_config": masked_values(manifest.run_config),
        "data": dataclasses.asdict(data),
        "history": [] if current is None else [_record_values(record) for record in current.records],
    }


def _config_values(manifest: Manifest) -> dict[str, Any]:
    """Return the resolved settings of a run; those given as a text or None are in ``unresolved``, too."""
    resolved: dict[str, Any] = CONFIG.encode(manifest.config, None)
    given: dict[str, Any] = resolved.pop("settings")
    texts = {name: given[name] for name in UNRESOLVED if given[name] is None or isinstance(given[name], str)}
    counts = {"n_features": manifest.data.shape[1], "n_init": len(manifest.config.seeds)}
    others = {"unresolved": texts, "feature_names": manifest.feature_names, "run_config": None}
    return given | resolved | counts | others


def _record_values(record: IterationRecord) -> dict[str, Any]:
    return dataclasses.asdict(record) | {"gap": _finite_or_none(record.gap)}


def _finite_or_none(value: float) -> float | None:
    """Return a number, or None for NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def _active_rows(state: FitState, rows: int) -> int:
    """Return how many rows the next iteration scores; rows of weight 0 count in a full pass."""
    if state.finished:
        return 0
    run = state.current
    return rows if run is None or run.full_pass_next else sum(run.n_active.values())


def run_table(described: dict[str, Any]) -> Table:
    """Return a table of the values that `inspect_run` returned."""
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
        "log-likelihood per row": "-" if bound is None else f"{bound:.9g} (natural logarithm)",
        "could still gain": gain_text(described["gap"]),
        "active rows": f"{described['active_rows']:,}",
        "stop reason": described["stop_reason"] or "-",
    }
    for number, note in enumerate(described["damaged"] + described["notes"], 1):
        lines[f"note {number}"] = note
    return text_table(f"run in {described['location']}", lines)


def history_table(described: dict[str, Any]) -> Table:
    """Return a table of the last iterations."""
    history = described["history"]
    table = Table(
        box=SIMPLE_HEAD, title=f"last {min(LAST_ITERATIONS, len(history))} of {len(history)} iterations"
    )
    for name in ("iteration", "log-likelihood per row", "active rows", "chunks", "bytes read", "seconds"):
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
