"""Which scheduler runs a fit, and what a distributed cluster must be asked before it begins."""

from __future__ import annotations

import platform
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import cache
from typing import Any

import dask
import dask.array as da
import dask.local
import dask.threaded
import numpy as np
import scipy
from dask.base import get_scheduler
from threadpoolctl import threadpool_info

from emtau_dask.errors import CheckpointError, ClusterError, EmtauError, InvalidDataError
from emtau_dask.storage import GraphSource, ObjectStore, RangeSource, Source

__all__ = ["active_client", "cluster_errors", "environment", "prove_access", "resident"]


@cache
def _environment() -> tuple[tuple[str, str], ...]:
    blas: dict[str, Any] = next(
        (library for library in threadpool_info() if library["user_api"] == "blas"), {}
    )
    return (
        ("python", platform.python_version()),
        ("numpy", np.__version__),
        ("scipy", scipy.__version__),
        ("blas", f"{blas.get('internal_api', 'unknown')} {blas.get('version', '')}".strip()),
        ("cpu", f"{platform.machine()} {blas.get('architecture', '')}".strip()),
    )


def environment() -> dict[str, str]:
    """Return what the last bits of a result depend on: library versions and the kind of CPU."""
    return dict(_environment())


def active_client() -> Any:
    """Return the distributed client that dask's own precedence chooses, None for a local scheduler.

    Raises
    ------
    ClusterError
        The client is asynchronous.
    """
    if "distributed" not in sys.modules:
        return None
    try:
        scheduler = get_scheduler()
    except RuntimeError as error:
        raise ClusterError(
            f"the active dask client is asynchronous or gone ({error}). Fit with a synchronous one, "
            "Client(..., asynchronous=False), or in a thread of its own; or set "
            "dask.config.set(scheduler='threads')."
        ) from error
    owner = getattr(scheduler, "__self__", None)
    return owner if type(owner).__module__.startswith("distributed") else None


def _in_process() -> bool:
    scheduler = get_scheduler()
    return scheduler in (None, dask.threaded.get, dask.local.get_sync)


def resident(source: Source) -> Source:
    """Return a source whose tasks need not carry an array that lies in this process's memory.

    On a cluster the array is sent to the workers once and stays there; other
    processes get each chunk with its task. In this process it is left as it is.
    """
    values = source.in_memory if isinstance(source, RangeSource) else None
    if values is None:
        return source
    client = active_client()
    if client is None and _in_process():
        return source
    chunks = (source.chunk_rows, *((size,) for size in source.shape[1:]))
    array = da.from_array(values, chunks=chunks)
    return GraphSource(array if client is None else array.persist())


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Raise `ClusterError` for what a cluster can do to a computation."""
    try:
        yield
    except CancelledError as error:
        raise ClusterError(
            f"the cluster gave the computation up ({error}). Its scheduler ended or was restarted, or "
            "the work "
            "was cancelled: connect to a scheduler that runs, and resume from the checkpoint."
        ) from error
    except Exception as error:
        translated = None if isinstance(error, EmtauError) else _translated(error)
        if translated is None:
            raise
        raise translated from error


def _translated(error: Exception) -> ClusterError | None:
    name = type(error).__name__
    if name == "KilledWorker":
        allowed = dask.config.get("distributed.scheduler.allowed-failures", 3)
        return ClusterError(
            f"{error}. Mostly workers die of memory: raise their memory limit, or use smaller chunks (see "
            "emtau fit --plan). Where they die of something else, such as preemption, raise dask's "
            f"distributed.scheduler.allowed-failures (here {allowed}) on the scheduler."
        )
    if name in ("CommClosedError", "TimeoutError", "NoSchedulerError") or (
        name == "RuntimeError" and "synchronous" in str(error)
    ):
        return ClusterError(
            f"the cluster cannot be reached ({name}: {error}). See that its scheduler runs, and connect anew."
        )
    return None


def _prove(
    objects: ObjectStore | None, key: str, sources: Sequence[tuple[str, Any]]
) -> tuple[bytes | None, list[str | None], dict[str, str]]:
    """Return what this worker finds in the checkpoint, what it sees of each source, and its environment."""
    held = None
    if objects is not None:
        held = objects.get(key, 64)
        objects.put(f"{key}-{uuid.uuid4().hex}", b"seen")
    return held, [ranges.identity() for _, ranges in sources], environment()


def prove_access(objects: ObjectStore | None, sources: Mapping[str, Source]) -> list[str]:
    """Let every worker prove that it reaches the checkpoint (or row state) and the data.

    Parameters
    ----------
    objects : ObjectStore or None
        Where row state will be; None where none is kept.
    sources : mapping of str to Source
        By name, for messages; those whose tasks read by themselves are tried.

    Returns
    -------
    list of str
        Warnings: workers whose library versions or CPU differ from this process's.

    Raises
    ------
    CheckpointError
        A worker does not see the checkpoint; names the worker.
    InvalidDataError
        A worker does not see the data, or sees other data.
    """
    client = active_client()
    if client is None:
        return []
    ranges = [(name, source.ranges) for name, source in sources.items() if isinstance(source, RangeSource)]
    own = [reader.identity() for _, reader in ranges]
    secret, key = uuid.uuid4().hex.encode(), f"probe/{uuid.uuid4().hex}"
    if objects is not None:
        if not objects.shared:
            raise CheckpointError(
                f"{objects.location} lies in this process's memory, which workers cannot reach. Give a "
                "folder "
                "that all of them see, or the URL of an object store."
            )
        objects.put(key, secret)
    try:
        with cluster_errors():
            answers = client.run(_prove, objects, key, ranges, on_error="return")
        seen = () if objects is None else set(objects.list("probe/"))
    finally:
        if objects is not None:
            objects.delete(objects.list("probe/"))
    place = "" if objects is None else objects.location
    differing = []
    for worker, answer in answers.items():
        if isinstance(answer, InvalidDataError):
            raise InvalidDataError(f"the worker {worker} cannot see the data: {answer}") from answer
        if isinstance(answer, BaseException):
            raise CheckpointError(_unseen(worker, place, f"{type(answer).__name__}: {answer}")) from answer
        held, identities, its_environment = answer
        if objects is not None and held != secret:
            raise CheckpointError(_unseen(worker, place, "it finds nothing there that this process wrote"))
        for (name, _), mine, its in zip(ranges, own, identities, strict=True):
            if mine != its:
                raise InvalidDataError(
                    f"the worker {worker} sees other data than this process for {name} ({its}, here {mine}). "
                    "Put the data where every worker sees it under the same path, or use an object store."
                )
        if its_environment != environment():
            differing.append(f"{worker} ({_difference(its_environment, environment())})")
    if objects is not None and len(seen) < 1 + len(answers):
        raise CheckpointError(
            f"of {len(answers)} workers that wrote to {place}, {len(seen) - 1} wrote where this process can "
            "see it. Use a folder that is shared by all of them, or the URL of an object store."
        )
    if not differing:
        return []
    return [
        "workers differ from this process in what the last bits of a result depend on: "
        f"{', '.join(sorted(differing))}. Another run need not give the same bits."
    ]


def _unseen(worker: str, place: str, why: str) -> str:
    return (
        f"the worker {worker} cannot use {place}, where row state goes ({why}). Give a checkpoint (or, "
        "without "
        "one, a dask temporary-directory) that every worker sees under the same path, or the URL of an "
        "object "
        "store."
    )


def _difference(its: Mapping[str, str], mine: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} {its.get(name)} here {mine[name]}" for name in mine if its.get(name) != mine[name]
    )
