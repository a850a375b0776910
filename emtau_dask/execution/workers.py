"""What workers are given and asked: the data's identity, shared payloads, caches.

Before a fit each worker is asked. One that joins later proves the same by itself: the data when it first
reads (`data.dask_arrays`), the place of row state when it first uses it (`storage.row_state`).
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import cloudpickle
import dask.array as da
import zarr

from emtau_dask.data.dask_arrays import (
    GraphSource,
    SharedRows,
    array_of_blocks,
    plain_zarr_of,
    shared_rows,
    zarr_beneath,
)
from emtau_dask.data.source import RangeSource, Source, is_stored
from emtau_dask.data.zarr_arrays import array_source, zarr_source
from emtau_dask.errors import CheckpointError, ClusterError, InvalidDataError
from emtau_dask.execution.graph import Payload
from emtau_dask.execution.scheduler import cluster_errors, in_process, one_line, unsendable
from emtau_dask.process import differences, numerical_environment, other_versions, software, this_process
from emtau_dask.storage.objects import ObjectStore, begun_elsewhere

ATTEMPTS = 3
SECRET_BYTES = 64
ANSWER_SECONDS = 5.0
"""How long the end of a fit waits for workers to say what software they have."""
_Given = tuple[ObjectStore | None, str, Sequence[SharedRows]]
S = TypeVar("S", bound=Source | None)


def shared_source(client: Any, source: Source, name: str) -> Source:
    """Return a source that the workers of a client read only where they see what this process sees.

    Reads samples of what is stored; without a client the source is left as it is.

    Parameters
    ----------
    client : distributed.Client or None
    source : Source
    name : str
        What users call it.

    Raises
    ------
    InvalidDataError
        This process cannot read the samples.
    """
    if client is None:
        return source
    if isinstance(source, GraphSource):
        what = f"what {name} is made from"
        beneath = tuple(shared_rows(found, what) for found in zarr_beneath(source.array))
        return GraphSource(source.array, beneath) if beneath else source
    if isinstance(source, RangeSource) and is_stored(source):
        return replace(source, ranges=shared_rows(source, name))
    return source


def shared_data(client: Any, data: Any, name: str) -> Any:
    """Return lazy data, shared as by `shared_source` where they plainly are what is stored.

    Parameters
    ----------
    client : distributed.Client or None
    data : dask array, zarr array or Source
    name : str
        What users call it.
    """
    if client is None:
        return data
    if isinstance(data, da.Array):
        plain = plain_zarr_of(data)
        return data if plain is None else shared_source(client, zarr_source(plain, data.chunks[0]), name)
    return shared_source(client, array_source(data) if isinstance(data, zarr.Array) else data, name)


def _shared_by(source: Source) -> tuple[SharedRows, ...]:
    """Return what workers prove of a source."""
    if isinstance(source, GraphSource):
        return source.beneath
    ranges = getattr(source, "ranges", None)
    return (ranges,) if isinstance(ranges, SharedRows) else ()


@dataclass(frozen=True)
class _WorkerReport:
    """What a worker says of the data, of the place of row state, and of its software.

    Attributes
    ----------
    secret : bytes or None
        What it reads where this process wrote.
    unusable : str
        Why it cannot read or write there; empty where it can.
    unseen : str
        What of the data it does not see, or sees otherwise; empty where it sees all.
    environment, software : dict
        See `numerical_environment` and `software`.
    unopened : str
        Why it could not look, to follow its name; empty where it could.
    """

    secret: bytes | None
    unusable: str
    unseen: str
    environment: dict[str, str]
    software: dict[str, str]
    unopened: str = ""


def _look(given: Payload[_Given]) -> _WorkerReport:
    """Return what this process finds; from a payload, so that a worker that cannot unpickle it says so."""
    secret, unusable, unseen = None, "", ""
    try:
        objects, folder, shared = given.value
    except ClusterError as error:
        why = str(error).removeprefix(f"{this_process()} ")
        return _WorkerReport(None, "", "", numerical_environment(), software(), unopened=why)
    try:
        if objects is not None:
            secret = objects.get(f"{folder}secret", SECRET_BYTES)
            objects.put(f"{folder}{uuid.uuid4().hex}", b"seen")
    except Exception as error:
        unusable = str(error)
    for rows in shared:
        unseen = unseen or rows.difference()
    return _WorkerReport(secret, unusable, unseen, numerical_environment(), software())


def _reports(client: Any, given: Payload[_Given]) -> dict[str, _WorkerReport]:
    """Return what the workers find, by address; those that go away meanwhile are left out."""
    found: dict[str, _WorkerReport] = {}
    lost: dict[str, BaseException] = {}
    for _ in range(ATTEMPTS):
        with cluster_errors():
            waiting = [worker for worker in client.nthreads() if worker not in found]
            answers = client.run(_look, given, workers=waiting, on_error="return") if waiting else {}
        lost = {worker: answer for worker, answer in answers.items() if not isinstance(answer, _WorkerReport)}
        found |= {worker: answer for worker, answer in answers.items() if worker not in lost}
        for worker, error in lost.items():
            if not isinstance(error, OSError):
                raise ClusterError(
                    f"the worker {worker} cannot run emtau_dask ({one_line(error)}). Install the same "
                    "packages on every worker and on the scheduler."
                ) from error
        if not lost:
            return found
    for worker, error in lost.items():
        if worker in client.nthreads():
            raise ClusterError(
                f"the worker {worker} does not answer ({one_line(error)}). Stop it, or start it anew."
            ) from error
    return found


def verify_access(client: Any, objects: ObjectStore | None, sources: Mapping[str, Source]) -> list[str]:
    """Let every worker prove that it reaches the checkpoint (or row state) and the data.

    Parameters
    ----------
    client : distributed.Client or None
    objects : ObjectStore or None
        Where row state will be; None where none is kept.
    sources : mapping of str to Source
        By name, for messages; those that are shared (see `shared_source`) are looked at.

    Returns
    -------
    list of str
        Warnings: workers whose library versions or CPU differ from this process's.

    Raises
    ------
    CheckpointError
        A worker does not see the checkpoint; names the worker.
    CheckpointTakenError
        Another process began a run there meanwhile.
    InvalidDataError
        A worker does not see the data, or sees other data.
    ClusterError
        A worker does not answer, lacks this package, or has another version of it.
    """
    if client is None:
        return []
    shared = [rows for source in sources.values() for rows in _shared_by(source)]
    reports = (
        _reports_of(client, None, "", shared) if objects is None else _reports_at(client, objects, shared)
    )
    for worker, report in reports.items():
        if report.unseen:
            raise InvalidDataError(f"the worker {worker} {report.unseen}")
    return _notes(reports)


def _reports_of(
    client: Any, objects: ObjectStore | None, folder: str, shared: Sequence[SharedRows]
) -> dict[str, _WorkerReport]:
    """Return what the workers find; raises `ClusterError` for one that cannot look."""
    with cluster_errors():
        given: Payload[_Given] = Payload.of((objects, folder, shared), made_with=software())
    reports = _reports(client, given)
    for worker, report in reports.items():
        if report.unopened:
            raise ClusterError(f"the worker {worker} {report.unopened}")
    return reports


def _reports_at(client: Any, objects: ObjectStore, shared: Sequence[SharedRows]) -> dict[str, _WorkerReport]:
    """Return what the workers find, after they proved that they read and write at ``objects``."""
    if not objects.shared:
        raise CheckpointError(
            f"{objects.location} lies in this process's memory, which workers cannot reach. Give a "
            "folder that all of them see, or the URL of an object store."
        )
    folder, secret = f"probe/{uuid.uuid4().hex}/", uuid.uuid4().hex.encode()
    objects.put(f"{folder}secret", secret)
    try:
        reports = _reports_of(client, objects, folder, shared)
        written = objects.list(folder)
        if f"{folder}secret" not in written:
            raise begun_elsewhere(objects)
    finally:
        with suppress(CheckpointError):
            objects.delete(objects.list(folder))
    for worker, report in reports.items():
        _check_place(worker, report, secret, objects.location)
    if len(written) - 1 < len(reports):
        raise CheckpointError(
            f"of {len(reports)} workers that wrote to {objects.location}, {len(written) - 1} wrote where "
            "this process can see it. Use a folder that all of them share, or the URL of an object store."
        )
    return reports


def _check_place(worker: str, report: _WorkerReport, secret: bytes, place: str) -> None:
    why = report.unusable
    if not why and report.secret != secret:
        why = "it does not find there what this process wrote"
    if why:
        raise CheckpointError(
            f"the worker {worker} cannot use {place}, where row state goes: {why.rstrip('.')}. "
            f"{other_versions(report.software, software())}Give a checkpoint (or, without one, a dask "
            "temporary-directory) that every worker sees under the same path, or the URL of an object store."
        )


def _notes(reports: Mapping[str, _WorkerReport]) -> list[str]:
    """Return what to tell of workers that differ from this process."""
    found = []
    last_bits = _differing(
        {worker: report.environment for worker, report in reports.items()}, numerical_environment()
    )
    if last_bits:
        found.append(
            "workers differ from this process in what the last bits of a result depend on: "
            f"{last_bits}. Another run need not give the same bits."
        )
    readers = _differing({worker: report.software for worker, report in reports.items()}, software())
    if readers:
        found.append(
            "workers differ from this process in the packages that read data and row state: "
            f"{readers}. Install the same versions on every worker."
        )
    return found


def _differing(theirs: Mapping[str, Mapping[str, str]], mine: Mapping[str, str]) -> str:
    """Return which workers differ, and in what; a package that only one side has may not be needed."""
    found = {}
    for worker, its in sorted(theirs.items()):
        both = [name for name in mine if name in its]
        found[worker] = differences({name: its[name] for name in both}, {name: mine[name] for name in both})
    return ", ".join(f"{worker} ({difference})" for worker, difference in found.items() if difference)


def differing_workers(client: Any) -> list[str]:
    """Return what `verify_access` would warn of now; nothing where a worker takes too long to answer."""
    if client is None:
        return []
    answers: dict[str, Any] = {}

    def ask() -> None:
        with suppress(Exception):
            given = Payload.of((None, "", ()), made_with=software())
            answers.update(client.run(_look, given, on_error="ignore"))

    asking = threading.Thread(target=ask, name="emtau-versions", daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    return _notes({worker: answer for worker, answer in answers.items() if isinstance(answer, _WorkerReport)})


def check_portable(what: str, thing: object) -> None:
    """Raise `ClusterError` where ``thing`` cannot be sent to other processes."""
    try:
        cloudpickle.dumps(thing)
    except Exception as error:
        raise ClusterError(unsendable(f"{what} {type(thing).__name__}", error)) from error


@contextmanager
def resident(client: Any, source: S) -> Iterator[S]:
    """Give a source whose tasks need not carry an array that lies in this process's memory.

    On a cluster the array is sent to the workers once and stays there until the
    end of the context (its scheduler keeps what a lost worker would have to be
    sent again); other processes get each chunk with its task. In this process it
    is left as it is, as is every other source, and None.
    """
    if not isinstance(source, RangeSource) or not source.in_memory or (client is None and in_process()):
        yield source
        return
    array = array_of_blocks(source, f"emtau-input-{uuid.uuid4().hex}")
    if client is None:
        yield cast("S", GraphSource(array, computed=False))
        return
    with cluster_errors():
        kept = array.persist()
    try:
        yield cast("S", GraphSource(kept, computed=False))
    finally:
        for future in sys.modules["distributed"].client.futures_of(kept):
            future.release()
