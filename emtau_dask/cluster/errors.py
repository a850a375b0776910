"""The errors of a cluster, translated into the package's own."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import contextmanager

from emtau_dask.cluster.scheduler import active_client, in_process
from emtau_dask.errors import ClusterError, EmtauError

CLUSTER_PACKAGES = "distributed", "tornado"


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


def unsendable(what: str, error: Exception) -> str:
    """Return what to tell of something that cannot be pickled for other processes."""
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
        return unsendable("what tasks need", error)
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
    words = ("pickle", "serialize")
    return not in_process() and (
        type(error).__name__ == "PicklingError"
        or (isinstance(error, TypeError | AttributeError) and any(word in message for word in words))
    )


def _is_disconnected() -> bool:
    """Return whether the client that was active has lost its scheduler."""
    try:
        client = active_client()
    except EmtauError:
        return False
    return client is not None and client.status != "running"
