"""The scheduler that dask's precedence chooses, the memory of its processes, and errors of a cluster."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask.multiprocessing
import dask.threaded
from dask.base import get_scheduler, named_schedulers
from dask.system import CPU_COUNT

from emtau_dask.errors import ClusterError, ConfigError, EmtauError
from emtau_dask.storage.direct_reads import usable_memory

CLUSTER_PACKAGES = "distributed", "tornado"
"""Packages whose errors are those of a cluster."""
HASH_SEED = "6640"
"""The seed with which dask's processes hash text alike."""


def _scheduler() -> Any:
    """Return the scheduler that dask's own precedence chooses, None for its default.

    If nothing has imported distributed, no client is active. It is not imported
    here, because that takes longer than a small fit.
    """
    setting = dask.config.get("scheduler", None)
    if "distributed" not in sys.modules and dask.config.get("get", None) is None:
        if setting is None:
            return None
        if isinstance(setting, str) and setting.lower() in named_schedulers:
            return named_schedulers[setting.lower()]
    return get_scheduler()


def active_client() -> Any:
    """Return the distributed client that dask's own precedence chooses, None for a local scheduler.

    Raises
    ------
    ClusterError
        The client is asynchronous, or there is none where the setting asks for one.
    ConfigError
        Dask's ``scheduler`` setting names none.
    """
    try:
        scheduler = _scheduler()
    except RuntimeError as error:
        if "no Client active" in str(error):
            raise ClusterError(
                f"dask's setting scheduler is {dask.config.get('scheduler')!r}, but there is no active "
                "client: create a Client first, or set dask.config.set(scheduler='threads')."
            ) from error
        raise ClusterError(
            f"the active dask client is asynchronous or gone ({error}). Fit with a synchronous one, "
            "Client(..., asynchronous=False), or in a thread of its own; or set "
            "dask.config.set(scheduler='threads')."
        ) from error
    except ValueError as error:
        raise ConfigError(f"dask's setting scheduler cannot be used: {error}") from error
    owner = getattr(scheduler, "__self__", None)
    distributed = sys.modules.get("distributed")
    return owner if distributed is not None and isinstance(owner, distributed.Client) else None


def local_scheduler() -> Callable[..., Any] | None:
    """Return the function that runs tasks in this process, ``schedule(tasks, key)``; None if others run them.

    It needs no dask collection; to make and optimise one takes longer than small tasks.
    """
    schedule: Callable[..., Any] = _scheduler() or dask.threaded.get
    return schedule if schedule in (dask.threaded.get, dask.local.get_sync) else None


@contextmanager
def lasting_processes() -> Iterator[None]:
    """Keep dask's pool of processes from pass to pass, if its setting ``scheduler`` is that and it has none.

    Else dask would start new processes in each pass, which import everything again.
    """
    if _scheduler() is not dask.multiprocessing.get or dask.config.get("pool", None) is not None:
        yield
        return
    if os.environ.get("PYTHONHASHSEED") in (None, "0"):
        os.environ["PYTHONHASHSEED"] = HASH_SEED
    begin = partial(
        dask.multiprocessing.initialize_worker_process,
        user_initializer=dask.config.get("multiprocessing.initializer", None),
    )
    context = dask.multiprocessing.get_context()
    pool = ProcessPoolExecutor(threads_of_process(), mp_context=context, initializer=begin)
    try:
        with dask.config.set({"pool": pool, "multiprocessing.initializer": None}):
            yield
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def in_process() -> bool:
    """Return whether a local scheduler runs tasks in this process."""
    return local_scheduler() is not None


def local_threads() -> int:
    """Return the number of threads that this process may use between passes: as many as for tasks."""
    if local_scheduler() is dask.local.get_sync:
        return 1
    return threads_of_process()


def threads_of_process() -> int:
    """Return the number of threads that dask's settings allow this process, whatever its clients."""
    setting = dask.config.get("scheduler", None)
    if isinstance(setting, str):
        setting = named_schedulers.get(setting.lower())
    if setting is dask.local.get_sync:
        return 1
    threads: int = dask.config.get("num_workers", None) or CPU_COUNT
    return threads


@contextmanager
def cluster_errors() -> Iterator[None]:
    """Raise `ClusterError` for errors of a cluster; the errors of tasks are raised unchanged."""
    try:
        yield
    except EmtauError:
        raise
    except CancelledError as error:
        raise ClusterError(
            f"the cluster gave the computation up ({one_line(error)}). Its scheduler ended or was restarted, "
            "or the work was cancelled: connect to a scheduler that runs, and resume from the checkpoint."
        ) from error
    except Exception as error:
        message = _translated(error)
        if message is None:
            raise
        raise ClusterError(message) from error


def one_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a chain."""
    before = error.__cause__ or error.__context__
    return error if before is None else _cause(before)


def unsendable(what: str, error: Exception) -> str:
    """Return the message for a value that cannot be pickled for other processes."""
    return (
        f"{what} cannot be sent to workers ({one_line(_cause(error))}). It must be picklable with all that "
        "it refers to, and importable on the workers and the scheduler; or set "
        "dask.config.set(scheduler='threads')."
    )


def _translated(error: Exception) -> str | None:
    """Return the message for an error of a cluster, None for one that a task raised."""
    kind, text = type(error), one_line(error)
    if kind.__name__ == "KilledWorker":
        return (
            f"{text}. Mostly workers die of memory: raise their memory limit, or use smaller chunks (see "
            "emtau fit --plan). If they die of something else, such as preemption, raise dask's "
            f"distributed.scheduler.allowed-failures (now {error.args[-1]}) on the scheduler."
        )
    if kind.__name__ in ("NoValidWorkerError", "NoWorkerError"):
        return f"{text}. Start a worker that tasks may run on, with the resources that annotations ask for."
    if isinstance(error, BrokenExecutor):
        return f"a process of dask's pool died ({text}). Mostly it is for lack of memory: use smaller chunks."
    if _is_about_pickling(error):
        return unsendable("what tasks need", error)
    is_cluster_error = kind.__module__.partition(".")[0] in CLUSTER_PACKAGES or _is_raised_by_the_cluster(
        error
    )
    if is_cluster_error or _is_disconnected():
        return f"the cluster cannot be reached ({text}). See that its scheduler runs, and connect anew."
    return None


def _is_raised_by_the_cluster(error: Exception) -> bool:
    """Return whether an error of the operating system was raised by distributed, and not in a task.

    Distributed raises Python's own OSError and TimeoutError if a connection cannot be made in time.
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


def memory_of_worker(limit: int) -> int:
    """Return the bytes that tasks may use of a worker's memory limit.

    At four fifths of it dask pauses a worker, for ever if the memory is not freed.
    """
    return limit * 4 // 5


def task_processes(client: Any) -> tuple[int, int] | None:
    """Return the bytes that a process with tasks may use, and its threads.

    Without a client that is this process, which may itself be a worker. If workers differ, it returns the
    least memory and the most threads; None if there are no workers now.
    """
    if client is None:
        return _own_memory(), threads_of_process()
    with cluster_errors():
        answers = client.run(_worker, on_error="ignore")
    if not answers:
        return None
    shared = len(answers)
    limits = [min(limit or usable // shared, usable) for limit, usable, _ in answers.values()]
    return memory_of_worker(min(limits)), max(threads for _, _, threads in answers.values())


def _own_memory() -> int:
    distributed = sys.modules.get("distributed")
    try:
        worker = None if distributed is None else distributed.get_worker()
    except ValueError:  # no task of a worker
        worker = None
    limit = None if worker is None else worker.memory_manager.memory_limit
    return min(memory_of_worker(limit), usable_memory()) if limit else usable_memory()


def _worker(dask_worker: Any) -> tuple[int | None, int, int]:
    """Return a worker's memory limit (0 or None for none), the bytes that it may use, and its threads."""
    return dask_worker.memory_manager.memory_limit, usable_memory(), dask_worker.state.nthreads


def dask_setup(worker: Any) -> None:
    """Log no warning for a task that is interrupted because its cluster is closed."""
    logging.getLogger("distributed.worker.state_machine").setLevel(logging.ERROR)
