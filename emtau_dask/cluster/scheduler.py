"""Which scheduler runs a fit's passes, by dask's own precedence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import dask
import dask.local
import dask.threaded
from dask.base import get_scheduler, named_schedulers
from dask.system import CPU_COUNT

from emtau_dask.errors import ClusterError, ConfigError


def _scheduler() -> Any:
    """Return what dask's own precedence chooses, None for its default.

    Where nothing has imported distributed, no client is active, and it need
    not be imported to find that out: that takes longer than many a fit.
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
        The client is asynchronous, or gone.
    ConfigError
        Dask's ``scheduler`` setting names none.
    """
    try:
        scheduler = _scheduler()
    except RuntimeError as error:
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
    """Return what runs tasks in this process, ``schedule(tasks, key)``; None where others run them.

    It needs no collection, whose making and optimising take longer than small tasks.
    """
    schedule: Callable[..., Any] = _scheduler() or dask.threaded.get
    return schedule if schedule in (dask.threaded.get, dask.local.get_sync) else None


def in_process() -> bool:
    """Return whether a local scheduler runs tasks in this process."""
    return local_scheduler() is not None


def local_threads() -> int:
    """Return how many threads this process may use for what it does between passes: as many as for tasks."""
    if local_scheduler() is dask.local.get_sync:
        return 1
    return threads_of_process()


def threads_of_process() -> int:
    """Return how many threads dask's settings leave this process, whatever its clients."""
    setting = dask.config.get("scheduler", None)
    if isinstance(setting, str):
        setting = named_schedulers.get(setting.lower())
    if setting is dask.local.get_sync:
        return 1
    threads: int = dask.config.get("num_workers", None) or CPU_COUNT
    return threads
