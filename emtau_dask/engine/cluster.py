"""What others depend on where they run tasks, and the errors of a cluster in our words."""

from __future__ import annotations

import platform
import sys
import traceback
import uuid
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import TypeVar, cast

import cloudpickle
import numpy as np
import scipy
import scipy.linalg
from threadpoolctl import threadpool_info

from emtau_dask.engine.scheduler import active_client, in_process
from emtau_dask.errors import ClusterError, EmtauError
from emtau_dask.storage import GraphSource, RangeSource, Source, array_of_blocks

__all__ = [
    "check_portable",
    "cluster_errors",
    "environment",
    "one_line",
    "resident",
]

S = TypeVar("S", bound=Source | None)
CLUSTER_PACKAGES = "distributed", "tornado"


@cache
def _environment() -> tuple[tuple[str, str], ...]:
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    blas = {f"{library['internal_api']} {library['version']}" for library in libraries}
    kinds = {str(library.get("architecture", "")) for library in libraries}
    return (
        ("python", platform.python_version()),
        ("numpy", np.__version__),
        ("scipy", scipy.__version__),
        ("blas", ", ".join(sorted(blas))),
        ("cpu", " ".join((platform.machine(), *sorted(kinds))).strip()),
    )


def environment(*, compiled: bool = False) -> dict[str, str]:
    """Return what the last bits of a result depend on: library versions and the kind of CPU.

    Of numba only where rows go by ``compiled`` tiles.
    """
    return {**dict(_environment()), **({"numba": version("numba")} if compiled else {})}


def check_portable(what: str, thing: object) -> None:
    """Raise `ClusterError` where other processes run tasks, and ``thing`` cannot be sent to them."""
    if in_process():
        return
    try:
        cloudpickle.dumps(thing)
    except Exception as error:
        raise ClusterError(_unsendable(f"{what} {type(thing).__name__}", error)) from error


@contextmanager
def resident(source: S) -> Iterator[S]:
    """Give a source whose tasks need not carry an array that lies in this process's memory.

    On a cluster the array is sent to the workers once and stays there until the
    end of the context (its scheduler keeps what a lost worker would have to be
    sent again); other processes get each chunk with its task. In this process it
    is left as it is, as is every other source, and None.
    """
    client = active_client()
    if not isinstance(source, RangeSource) or not source.in_memory or (client is None and in_process()):
        yield source
        return
    array = array_of_blocks(source, f"emtau-input-{uuid.uuid4().hex}")
    if client is None:
        yield cast("S", GraphSource(array))
        return
    with cluster_errors():
        kept = array.persist()
    try:
        yield cast("S", GraphSource(kept))
    finally:
        for future in sys.modules["distributed"].client.futures_of(kept):
            future.release()


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Raise `ClusterError` for what a cluster can do to a computation; tasks' own errors stay as they are."""
    try:
        yield
    except EmtauError:
        raise
    except CancelledError as error:
        raise ClusterError(
            f"the cluster gave the computation up ({one_line(error)}). Its scheduler ended or was "
            "restarted, "
            "or the work was cancelled: connect to a scheduler that runs, and resume from the checkpoint."
        ) from error
    except Exception as error:
        message = _translated(error)
        if message is None:
            raise
        raise ClusterError(message) from error


def one_line(error: BaseException) -> str:
    """Return an error's kind and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")


def _cause(error: BaseException) -> BaseException:
    """Return the error that began a chain of them."""
    before = error.__cause__ or error.__context__
    return error if before is None else _cause(before)


def _unsendable(what: str, error: Exception) -> str:
    return (
        f"{what} cannot be sent to workers ({one_line(_cause(error))}). It must be picklable with all that "
        "it refers to, and importable on the workers and the scheduler; or set "
        "dask.config.set(scheduler='threads')."
    )


def _translated(error: Exception) -> str | None:
    """Return what to tell of an error that is a cluster's, None for one that a task raised."""
    kind, text = type(error), one_line(error)
    if kind.__name__ == "KilledWorker":
        return (
            f"{text}. Mostly workers die of memory: raise their memory limit, or use smaller chunks (see "
            "emtau fit --plan). Where they die of something else, such as preemption, raise dask's "
            f"distributed.scheduler.allowed-failures (now {error.args[-1]}) on the scheduler."
        )
    if kind.__name__ in ("NoValidWorkerError", "NoWorkerError"):
        return f"{text}. Start a worker that tasks may run on, with the resources that annotations ask for."
    if isinstance(error, BrokenExecutor):
        return f"a worker process died ({text}). Mostly it is for lack of memory: use smaller chunks."
    if _is_about_pickling(error):
        return _unsendable("what tasks need", error)
    theirs = kind.__module__.partition(".")[0] in CLUSTER_PACKAGES or _is_raised_by_the_cluster(error)
    if theirs or _is_disconnected():
        return f"the cluster cannot be reached ({text}). See that its scheduler runs, and connect anew."
    return None


def _is_raised_by_the_cluster(error: Exception) -> bool:
    """Return whether an error of the operating system was raised in distributed's own calls, not in a task.

    Distributed raises Python's own OSError and TimeoutError where a connection cannot be made in time.
    """
    if not isinstance(error, OSError):
        return False
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [name.partition(".")[0] for name in reversed(frames)]
    return next((name for name in packages if name not in sys.stdlib_module_names), "") in CLUSTER_PACKAGES


def _is_about_pickling(error: Exception) -> bool:
    message = str(error).lower()
    if "deserialization of the task graph" in message:
        return True
    told = ("pickle", "serialize")
    return not in_process() and (
        type(error).__name__ == "PicklingError"
        or (isinstance(error, TypeError | AttributeError) and any(word in message for word in told))
    )


def _is_disconnected() -> bool:
    """Return whether the client that was active has lost its scheduler."""
    try:
        client = active_client()
    except EmtauError:
        return False
    return client is not None and client.status != "running"
