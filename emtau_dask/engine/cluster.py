"""What a distributed cluster must be asked before a fit begins, and its errors in our words."""

from __future__ import annotations

import platform
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar, cast

import cloudpickle
import numpy as np
import scipy
import scipy.linalg
from threadpoolctl import threadpool_info

from emtau_dask.engine.scheduler import active_client, in_process
from emtau_dask.errors import CheckpointError, ClusterError, EmtauError, InvalidDataError
from emtau_dask.storage import GraphSource, ObjectStore, RangeSource, Source, array_of_blocks
from emtau_dask.storage.sources import RangeReader

__all__ = [
    "check_portable",
    "cluster_errors",
    "environment",
    "prove_access",
    "resident",
]

S = TypeVar("S", bound=Source | None)
PROOFS = 3
SECRET_BYTES = 64


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
            f"the cluster gave the computation up ({_one_line(error)}). Its scheduler ended or was "
            "restarted, "
            "or the work was cancelled: connect to a scheduler that runs, and resume from the checkpoint."
        ) from error
    except Exception as error:
        message = _translated(error)
        if message is None:
            raise
        raise ClusterError(message) from error


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".: ")


def _cause(error: BaseException) -> BaseException:
    """Return the error that began a chain of them."""
    before = error.__cause__ or error.__context__
    return error if before is None else _cause(before)


def _unsendable(what: str, error: Exception) -> str:
    return (
        f"{what} cannot be sent to workers ({_one_line(_cause(error))}). It must be picklable with all that "
        "it refers to, and importable on the workers and the scheduler; or set "
        "dask.config.set(scheduler='threads')."
    )


def _translated(error: Exception) -> str | None:
    """Return what to tell of an error that is a cluster's, None for one that a task raised."""
    kind, text = type(error), _one_line(error)
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
    if kind.__module__.partition(".")[0] in ("distributed", "tornado") or _is_disconnected():
        return f"the cluster cannot be reached ({text}). See that its scheduler runs, and connect anew."
    return None


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


@dataclass(frozen=True)
class _Sight:
    """What a worker finds.

    Attributes
    ----------
    secret : bytes or None
        What it reads where this process wrote.
    unusable : str
        Why it cannot read or write there; empty where it can.
    identities : tuple of str
        Of the sources that it sees.
    unseen : str
        Why it does not see the next of them; empty where it sees all.
    environment : dict
    """

    secret: bytes | None
    unusable: str
    identities: tuple[str, ...]
    unseen: str
    environment: dict[str, str]


def _look(objects: ObjectStore | None, folder: str, readers: Sequence[RangeReader]) -> _Sight:
    secret, unusable, identities, unseen = None, "", [], ""
    try:
        if objects is not None:
            secret = objects.get(f"{folder}secret", SECRET_BYTES)
            objects.put(f"{folder}{uuid.uuid4().hex}", b"seen")
    except Exception as error:
        unusable = str(error)
    try:
        for reader in readers:
            identities.append(str(reader.identity()))  # noqa: PERF401
    except Exception as error:
        unseen = str(error)
    return _Sight(secret, unusable, tuple(identities), unseen, environment())


def _sights(client: Any, *told: Any) -> dict[str, _Sight]:
    """Return what the workers find, by address; those that go away meanwhile are left out."""
    found: dict[str, _Sight] = {}
    lost: dict[str, BaseException] = {}
    for _ in range(PROOFS):
        with cluster_errors():
            waiting = [worker for worker in client.nthreads() if worker not in found]
            answers = client.run(_look, *told, workers=waiting, on_error="return") if waiting else {}
        lost = {worker: answer for worker, answer in answers.items() if not isinstance(answer, _Sight)}
        found |= {worker: answer for worker, answer in answers.items() if worker not in lost}
        for worker, error in lost.items():
            if not isinstance(error, OSError):
                raise ClusterError(
                    f"the worker {worker} cannot run emtau_dask ({_one_line(error)}). Install the same "
                    "packages on every worker and on the scheduler."
                ) from error
        if not lost:
            return found
    for worker, error in lost.items():
        if worker in client.nthreads():
            raise ClusterError(
                f"the worker {worker} does not answer ({_one_line(error)}). Stop it, or start it anew."
            ) from error
    return found


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
    ClusterError
        A worker does not answer, or lacks this package.
    """
    client = active_client()
    if client is None:
        return []
    readers = {
        name: source.ranges
        for name, source in sources.items()
        if isinstance(source, RangeSource) and not source.in_memory
    }
    own = [str(reader.identity()) for reader in readers.values()]
    folder, secret = f"probe/{uuid.uuid4().hex}/", uuid.uuid4().hex.encode()
    if objects is not None:
        if not objects.shared:
            raise CheckpointError(
                f"{objects.location} lies in this process's memory, which workers cannot reach. Give a "
                "folder that all of them see, or the URL of an object store."
            )
        objects.put(f"{folder}secret", secret)
    try:
        sights = _sights(client, objects, folder, list(readers.values()))
        arrived = 0 if objects is None else len(objects.list(folder)) - 1
    finally:
        if objects is not None:
            with suppress(CheckpointError):
                objects.delete(objects.list(folder))
    for worker, sight in sights.items():
        if objects is not None:
            _check_place(worker, sight, secret, objects.location)
        _check_data(worker, sight, list(readers), own)
    if objects is not None and arrived < len(sights):
        raise CheckpointError(
            f"of {len(sights)} workers that wrote to {objects.location}, {arrived} wrote where this process "
            "can see it. Use a folder that is shared by all of them, or the URL of an object store."
        )
    return _differing(sights)


def _check_place(worker: str, sight: _Sight, secret: bytes, place: str) -> None:
    why = sight.unusable
    if not why and sight.secret != secret:
        why = "it does not find there what this process wrote"
    if why:
        raise CheckpointError(
            f"the worker {worker} cannot use {place}, where row state goes: {why.rstrip('.')}. Give a "
            "checkpoint (or, without one, a dask temporary-directory) that every worker sees under the same "
            "path, or the URL of an object store."
        )


def _check_data(worker: str, sight: _Sight, names: Sequence[str], own: Sequence[str]) -> None:
    remedy = "Put it where every worker sees it under the same path, or into an object store."
    for name, mine, its in zip(names, own, sight.identities, strict=False):
        if its != mine:
            raise InvalidDataError(
                f"the worker {worker} sees other data than this process as {name} ({its}; here {mine}). "
                f"{remedy}"
            )
    if sight.unseen:
        name = names[len(sight.identities)]
        raise InvalidDataError(f"the worker {worker} cannot see {name}: {sight.unseen.rstrip('.')}. {remedy}")


def _differing(sights: Mapping[str, _Sight]) -> list[str]:
    mine = environment()
    differing = [
        f"{worker} ({_difference(sight.environment, mine)})"
        for worker, sight in sorted(sights.items())
        if sight.environment != mine
    ]
    if not differing:
        return []
    return [
        "workers differ from this process in what the last bits of a result depend on: "
        f"{', '.join(differing)}. Another run need not give the same bits."
    ]


def _difference(its: Mapping[str, str], mine: Mapping[str, str]) -> str:
    return ", ".join(
        f"{name} {its.get(name)}, here {mine[name]}" for name in mine if its.get(name) != mine[name]
    )
