"""Tasks in threads of this process, by dask's own scheduler, which they need not wait for.

Dask's thread learns that a task is done before it hands out another one, so that between two tasks a
thread waits until two others have woken up: a good part of what a small chunk takes. Here dask hands
out one task more for each thread than can run, which lies ready; and the last one, beside which
nothing else is left to do, runs in the thread that waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any
from weakref import WeakSet

import dask.config
import dask.threaded
from dask.callbacks import Callback
from dask.local import SynchronousExecutor

from emtau_dask.engine.scheduler import local_threads

__all__ = ["compute_in_threads"]


class _Pools(threading.local):
    """Pools of threads, by size; each thread that computes has its own.

    Tasks of one may compute, too, and would wait for ever for a place in the pool that they are in.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, ThreadPoolExecutor] = {}

    def of(self, threads: int) -> ThreadPoolExecutor:
        """Return the pool of so many threads."""
        if threads not in self._by_size:
            self._by_size[threads] = ThreadPoolExecutor(threads, thread_name_prefix="emtau")
        return self._by_size[threads]


_pools = _Pools()


class _HandedOut:
    """What dask submits tasks to, up to two for each thread of ``pool``, of which ``last`` is the last."""

    def __init__(self, pool: ThreadPoolExecutor, last: Hashable) -> None:
        self._pool, self._last = pool, last
        self._max_workers = 2 * pool._max_workers
        self._here = SynchronousExecutor()
        self._at_last = False
        self._futures: WeakSet[Future[Any]] = WeakSet()

    def expect(self, key: Hashable, *_: Any) -> None:
        """Learn that a task will be submitted: several, and then they are, or the last one alone."""
        self._at_last = key == self._last

    def submit(self, run: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        """Run the last task; have any other run by a thread of the pool."""
        if self._at_last:
            done: Future[Any] = self._here.submit(run, *arguments)
            return done
        future = self._pool.submit(copy_context().run, run, *arguments)
        self._futures.add(future)
        return future

    def cancel(self) -> None:
        """Let no other task begin."""
        for future in list(self._futures):
            future.cancel()


def compute_in_threads(tasks: Mapping[Any, Any], key: Hashable) -> Any:
    """Return the value of a key of a graph, by dask's ``pool`` or as many threads as its ``num_workers``.

    The task of that key runs in the calling thread. The others see the caller's context variables, as
    in dask's own pools.

    Parameters
    ----------
    tasks : mapping
        That hold nothing while they wait for a thread.
    key : Hashable
        Of a task that all others are computed for.
    """
    pool = dask.config.get("pool", None)
    if pool is None:
        pool = _pools.of(local_threads())
    if not isinstance(pool, ThreadPoolExecutor):
        return dask.threaded.get(tasks, key)
    handed_out = _HandedOut(pool, key)
    # Not by a context of its own, which all threads that compute would share.
    callbacks = [(None, None, handed_out.expect, None, None), *Callback.active]
    try:
        return dask.threaded.get(tasks, key, pool=handed_out, callbacks=callbacks)
    except BaseException:
        handed_out.cancel()
        raise
