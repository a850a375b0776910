"""The plan of a fit: memory, bytes and tasks of each process that computes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dask.system import CPU_COUNT
from dask.utils import format_bytes, parse_bytes
from rich.table import Table

from emtau_dask.cli.config import ClusterSection, RunConfig, estimator_of
from emtau_dask.cli.console import text_table
from emtau_dask.cli.inputs import Inputs, data_text
from emtau_dask.dask_config import AUTO, read_settings
from emtau_dask.data.source import Source
from emtau_dask.em.fit import FitSources
from emtau_dask.em.memory import (
    MIN_CACHE_BYTES,
    FitDemand,
    FitOutline,
    automatic_cache,
    demand,
    largest_chunk,
    outline_of,
)
from emtau_dask.errors import ConfigError, counted
from emtau_dask.estimator.fitting import fit_settings
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.scheduler import memory_of_worker
from emtau_dask.settings import Settings
from emtau_dask.storage.direct_reads import usable_memory


@dataclass(frozen=True)
class Plan:
    """The resources that a run needs in each process that computes.

    Attributes
    ----------
    demand : FitDemand
    threads : int
        Chunks that a process works on at a time.
    limit : int or None
        Memory limit of a process (bytes); None if unknown.
    data : str
        A text for people on the data.
    longest, fitting : int
        Rows of the longest chunk, and of the longest that would fit the limit; 0 if none would.
    outlined : bool
        Whether the data are a dataset that the fit creates first.
    settings : mapping of str to int
        Settings of dask for the run: the values that the plan used for "auto".
    """

    demand: FitDemand
    threads: int
    limit: int | None
    data: str
    longest: int
    fitting: int
    outlined: bool
    settings: Mapping[str, int]


def plan_of(config: RunConfig, inputs: Inputs) -> Plan:
    """Return the plan of a config's run on opened data."""
    cluster, rows = config.cluster, inputs.rows
    threads = cluster.threads
    if cluster.scheduler != "processes":
        threads = cluster.workers or os.cpu_count() or 1
    weights = None if inputs.weights is None else inputs.weights.aligned(rows.chunk_rows)
    fitted = FitSources(rows, weights)
    estimator = estimator_of(config)
    settings = fit_settings(estimator, Settings.of(estimator), fitted, choose_executor())
    outline = outline_of(settings, rows, threads=threads, in_process=cluster.scheduler == "threads")
    limit = None if cluster.memory_limit is None else int(parse_bytes(cluster.memory_limit))
    sources = fitted.named()
    cache = _cache_limit(cluster, limit, sources, outline)
    outline = replace(outline, cache_limit=sys.maxsize if cache is None else cache)
    need = demand(sources, outline)
    longest = fitting = max(rows.chunk_rows, default=0)
    if limit is not None and need.memory > limit:
        fitting = largest_chunk(sources, outline, limit)
    dask_settings = {} if cache is None else {"emtau.cache-bytes": cache}
    data = data_text(config, inputs)
    return Plan(need, threads, limit, data, longest, fitting, inputs.outlined, dask_settings)


def _cache_limit(
    cluster: ClusterSection, limit: int | None, sources: Mapping[str, Source], outline: FitOutline
) -> int | None:
    """Return the maximum bytes cached between passes; None if workers of another cluster decide."""
    setting, usable = read_settings().cache_bytes, usable_memory()
    if setting != AUTO:
        return setting
    if cluster.scheduler == "threads":
        return automatic_cache(sources, outline, min(limit or usable, usable))
    if cluster.scheduler == "processes":
        workers = cluster.workers or os.cpu_count() or 1
        share = min(1 / workers, cluster.threads / CPU_COUNT)  # dask limits a worker by the second value.
        return automatic_cache(sources, outline, memory_of_worker(limit or int(usable * share)))
    return None


def check_memory(plan: Plan) -> None:
    """Raise `ConfigError` for a plan that exceeds its limit, with the chunk size that would fit."""
    if plan.limit is None or plan.demand.memory <= plan.limit:
        return
    needed = {"cache-bytes": plan.demand.cache, "read-ahead-bytes": plan.demand.read_ahead}
    remedies = [
        f"lower dask's emtau.{name} (of which {format_bytes(size)} are needed)"
        for name, size in needed.items()
        if size > MIN_CACHE_BYTES
    ]
    chunks = "Smaller chunks would not help:"
    if plan.fitting:
        most = counted(plan.fitting, "row")
        chunks = f"Write the data in chunks of at most {most} (they have {plan.longest:,}),"
    raise ConfigError(
        f"cluster.memory_limit = {format_bytes(plan.limit)} is less than the "
        f"{format_bytes(plan.demand.memory)} that a process with {counted(plan.threads, 'thread')} is "
        f"predicted to need. {chunks} {', '.join([*remedies, 'use fewer threads'])}, or raise the limit."
    )


def plan_table(plan: Plan) -> Table:
    """Return a plan as a table."""
    need = plan.demand
    unknown = "" if need.complete else ", and what the input's own tasks need"
    threads = counted(plan.threads, "thread")
    lines = {
        "data": plan.data,
        "memory of a process": f"at most {format_bytes(need.memory)}{unknown} ({threads})",
        "of which reading a chunk": format_bytes(need.largest_read),
        "of which active rows and row state kept": format_bytes(need.cache),
        "of which chunks read ahead": format_bytes(need.read_ahead),
        "limit": "none given (cluster.memory_limit)" if plan.limit is None else format_bytes(plan.limit),
        "chunks": f"{need.chunks:,}, the longest of {counted(plan.longest, 'row')}",
        "bytes of a full pass": f"{format_bytes(need.pass_bytes)} decoded",
        "tasks of a full iteration": f"{need.tasks:,}",
    }
    if plan.outlined:
        lines["data"] += "; a dataset that the fit makes first, on a disk with room for a full pass"
    return text_table("what the fit will need; nothing has been run", lines)
