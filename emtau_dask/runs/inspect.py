"""What a checkpoint holds, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from rich.table import Table

from emtau_dask.em import FitState, IterationRecord
from emtau_dask.estimator import gap_text, open_saved
from emtau_dask.io.objects import FORMAT, VERSION
from emtau_dask.messages import masked_values, printable, shown
from emtau_dask.runs.tables import text_table

LAST_ITERATIONS = 10


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
        "config": config.model_dump(mode="json", exclude={"given", "run_config"}),
        "run_config": masked_values(config.run_config),
        "data": data.model_dump(mode="json"),
        "history": [] if current is None else [_plain(record) for record in current.records],
    }


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
    return rows if run is None or run.afresh else sum(run.remaining.values())


def run_table(described: dict[str, Any]) -> Table:
    """Return a table for people of what `inspect_run` returned."""
    config, bound = described["config"], described["lower_bound"]
    algorithm = config["algorithm"]
    parameters = ", ".join(f"{key}={value}" for key, value in algorithm["params"].items())
    automatic = "auto: " if config["words"].get("algorithm") == "auto" else ""
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
    title = printable(f"run in {described['location']}")
    return text_table(title, {name: shown(text) for name, text in lines.items()})


def history_table(described: dict[str, Any]) -> Table:
    """Return a table of the last iterations."""
    history = described["history"]
    table = Table(title=f"last {min(LAST_ITERATIONS, len(history))} of {len(history)} iterations")
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
