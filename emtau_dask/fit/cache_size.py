"""How many bytes of rows and row state a process may keep in memory between the passes of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from emtau_dask.cluster import task_processes
from emtau_dask.execution import Executor
from emtau_dask.fit.fitting import FitSettings, FitSources
from emtau_dask.fit.journal import row_fields
from emtau_dask.fit.memory_estimate import FitOutline, demand
from emtau_dask.io.sources import Source
from emtau_dask.settings import AUTO, read_settings

SHARE = 5
"""By default rows and state may take a fifth of the memory."""
LEAST_BYTES = 2**20
"""They may take so much in any case. The rest goes to files, which need a cache too."""
UNKNOWN_BYTES = 2**25
"""They may take so much where the memory is not known: the cluster has no workers yet."""


def automatic_cache(sources: Mapping[str, Source], outline: FitOutline, memory: int) -> int:
    """Return the bytes that a process may keep, of ``memory`` bytes that it may use in all.

    They are a fifth of them, or what the fit leaves by the prediction of its other needs.

    Parameters
    ----------
    sources : mapping of str to Source
        As for `demand`.
    outline : FitOutline
        Whatever its ``cache_limit``.
    memory : int
    """
    least = demand(sources, replace(outline, cache_limit=LEAST_BYTES))
    return max(LEAST_BYTES, min(memory // SHARE, memory - least.memory + least.cache))


def cache_bytes(settings: FitSettings, sources: FitSources, executor: Executor) -> int:
    """Return the bytes that each process may keep for a fit; 0 where it keeps nothing.

    As dask's ``emtau.cache-bytes`` says; with "auto", see `automatic_cache`.
    """
    limits, em = read_settings(), settings.em
    rows, K = sources.rows, settings.n_components
    fields = row_fields(rows, K, em.policy, em.max_iter)
    sampled = sum(em.climbing.samples.shares) if em.climbing is not None else 0.0
    if fields is None and not sampled:
        return 0
    if limits.cache_bytes != AUTO:
        return limits.cache_bytes
    found = task_processes(executor.client)
    if found is None:
        return UNKNOWN_BYTES
    memory, threads = found
    outline = FitOutline(
        n_components=K,
        covariance_type=settings.structure.name,
        fields=fields,
        threads=threads,
        cache_limit=0,
        read_ahead_limit=limits.read_ahead_bytes if executor.in_process else 0,
        compiled=settings.compiled,
        sampled=sampled,
        missing=settings.missing,
    )
    return automatic_cache(sources.named(), outline, memory)
