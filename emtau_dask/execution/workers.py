"""Verification that workers see the same data and the same store; arrays that are sent to workers once.

Before a fit, each worker is asked. A worker that joins later verifies the data at its first read
(`data.dask_arrays`), and the store of row state at its first use (`storage.row_state`).
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
import dask
import dask.array as da
import zarr

from emtau_dask.data.dask_arrays import (
    GraphSource,
    SharedRows,
    array_of_blocks,
    shared_rows,
    unchanged_zarr_array,
    zarr_sources_in,
)
from emtau_dask.data.source import RangeSource, Source, is_stored
from emtau_dask.data.zarr_arrays import array_source, zarr_source
from emtau_dask.errors import CheckpointError, ClusterError, InvalidDataError
from emtau_dask.execution.graph import Payload
from emtau_dask.execution.scheduler import cluster_errors, in_process, one_line, unsendable
from emtau_dask.process import differences, numerical_environment, other_versions, software, this_process
from emtau_dask.storage.objects import ObjectStore, begun_elsewhere

ATTEMPTS = 3
"""Number of times that a worker is asked."""
TOKEN, MAX_TOKEN_BYTES = "token", 64
"""Key of the object that workers read, and maximum bytes of it."""
ANSWER_SECONDS = 5.0
"""Maximum wait for the workers' software at the end of a fit (seconds)."""
_Question = tuple[ObjectStore | None, str, Sequence[SharedRows]]
S = TypeVar("S", bound=Source | None)


def shared_source(client: Any, source: Source, name: str) -> Source:
    """Return a source whose rows the workers of a client verify before they read them.

    It reads samples of stored rows; without a client the source is unchanged.

    Parameters
    ----------
    client : distributed.Client or None
    source : Source
    name : str
        Its name in messages.

    Raises
    ------
    InvalidDataError
        This process cannot read the samples.
    """
    if client is None:
        return source
    if isinstance(source, GraphSource):
        what = f"what {name} is made from"
        stored_inputs = tuple(shared_rows(found, what) for found in zarr_sources_in(source.array))
        return GraphSource(source.array, stored_inputs) if stored_inputs else source
    if isinstance(source, RangeSource) and is_stored(source):
        return replace(source, ranges=shared_rows(source, name))
    return source


def shared_data(client: Any, data: Any, name: str) -> Any:
    """Return lazy data, shared as by `shared_source` if they are stored rows without further operations.

    Parameters
    ----------
    client : distributed.Client or None
    data : dask array, zarr array or Source
    name : str
        Its name in messages.
    """
    if client is None:
        return data
    if isinstance(data, da.Array):
        plain = unchanged_zarr_array(data)
        return data if plain is None else shared_source(client, zarr_source(plain, data.chunks[0]), name)
    return shared_source(client, array_source(data) if isinstance(data, zarr.Array) else data, name)


def _shared_by(source: Source) -> tuple[SharedRows, ...]:
    """Return the rows of a source that workers verify."""
    if isinstance(source, GraphSource):
        return source.stored_inputs
    ranges = getattr(source, "ranges", None)
    return (ranges,) if isinstance(ranges, SharedRows) else ()


@dataclass(frozen=True)
class _WorkerReport:
    """The answer of a worker.

    Attributes
    ----------
    token : bytes or None
        The object of this process in the store of row state, as the worker reads it.
    store_error : str
        Why it cannot use the store; empty if it can.
    data_error : str
        The difference of its data from those of this process; empty if there is none.
    environment, software : dict
        See `numerical_environment` and `software`.
    pickle_error : str
        Why it could not unpickle the question; empty if it could.
    """

    token: bytes | None
    store_error: str
    data_error: str
    environment: dict[str, str]
    software: dict[str, str]
    pickle_error: str = ""


def _report(question: Payload[_Question]) -> _WorkerReport:
    """Return the answer of this process, also if it cannot unpickle the question."""
    token, store_error, data_error = None, "", ""
    try:
        objects, folder, shared = question.value
    except ClusterError as error:
        why = str(error).removeprefix(f"{this_process()} ")
        return _WorkerReport(None, "", "", numerical_environment(), software(), pickle_error=why)
    try:
        if objects is not None:
            token = objects.get(f"{folder}{TOKEN}", MAX_TOKEN_BYTES)
            objects.put(f"{folder}{uuid.uuid4().hex}", b"seen")
    except Exception as error:
        store_error = str(error)
    for rows in shared:
        data_error = data_error or rows.difference()
    return _WorkerReport(token, store_error, data_error, numerical_environment(), software())


def _reports(client: Any, question: Payload[_Question]) -> dict[str, _WorkerReport]:
    """Return the answers of workers, by address, without those of workers that are lost."""
    found: dict[str, _WorkerReport] = {}
    lost: dict[str, BaseException] = {}
    for _ in range(ATTEMPTS):
        with cluster_errors():
            waiting = [worker for worker in client.nthreads() if worker not in found]
            answers = client.run(_report, question, workers=waiting, on_error="return") if waiting else {}
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
    """Verify that every worker reaches the store of row state and sees the same data.

    Parameters
    ----------
    client : distributed.Client or None
    objects : ObjectStore or None
        The store of row state; None if none is kept.
    sources : mapping of str to Source
        By name, for messages; shared sources are verified, see `shared_source`.

    Returns
    -------
    list of str
        Warnings: workers whose library versions or CPU differ from this process's.

    Raises
    ------
    CheckpointError
        A worker does not see the checkpoint; names the worker.
    CheckpointTakenError
        Another process has just begun a run there.
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
        if report.data_error:
            raise InvalidDataError(f"the worker {worker} {report.data_error}")
    return _notes(reports)


def _reports_of(
    client: Any, objects: ObjectStore | None, folder: str, shared: Sequence[SharedRows]
) -> dict[str, _WorkerReport]:
    """Return the answers of workers; raises `ClusterError` for one that cannot unpickle the question."""
    with cluster_errors():
        question: Payload[_Question] = Payload.of((objects, folder, shared), made_with=software())
    reports = _reports(client, question)
    for worker, report in reports.items():
        if report.pickle_error:
            raise ClusterError(f"the worker {worker} {report.pickle_error}")
    return reports


def _reports_at(client: Any, objects: ObjectStore, shared: Sequence[SharedRows]) -> dict[str, _WorkerReport]:
    """Return the answers of workers, after verifying that they read and write at ``objects``."""
    if not objects.shared:
        raise CheckpointError(
            f"{objects.location} lies in this process's memory, which workers cannot reach. Give a "
            "folder that all of them see, or the URL of an object store."
        )
    folder, token = f"probe/{uuid.uuid4().hex}/", uuid.uuid4().hex.encode()
    objects.put(f"{folder}{TOKEN}", token)
    try:
        reports = _reports_of(client, objects, folder, shared)
        written = objects.list(folder)
        if f"{folder}{TOKEN}" not in written:
            raise begun_elsewhere(objects)
    finally:
        with suppress(CheckpointError):
            objects.delete(objects.list(folder))
    for worker, report in reports.items():
        _check_store(worker, report, token, objects.location)
    if len(written) - 1 < len(reports):
        raise CheckpointError(
            f"of {len(reports)} workers that wrote to {objects.location}, {len(written) - 1} wrote where "
            "this process can see it. Use a folder that all of them share, or the URL of an object store."
        )
    return reports


def _check_store(worker: str, report: _WorkerReport, token: bytes, location: str) -> None:
    why = report.store_error
    if not why and report.token != token:
        why = "it does not find there what this process wrote"
    if why:
        raise CheckpointError(
            f"the worker {worker} cannot use {location}, where row state goes: {why.rstrip('.')}. "
            f"{other_versions(report.software, software())}Give a checkpoint (or, without one, a dask "
            "temporary-directory) that every worker sees under the same path, or the URL of an object store."
        )


def _notes(reports: Mapping[str, _WorkerReport]) -> list[str]:
    """Return warnings about workers that differ from this process."""
    found = []
    last_bits = _differing(
        {worker: report.environment for worker, report in reports.items()}, numerical_environment()
    )
    if last_bits:
        found.append(
            "workers differ from this process in what the last digits of a result depend on: "
            f"{last_bits}. The results of another run need not be identical."
        )
    readers = _differing({worker: report.software for worker, report in reports.items()}, software())
    if readers:
        found.append(
            "workers differ from this process in the packages that read data and row state: "
            f"{readers}. Install the same versions on every worker."
        )
    return found


def _differing(theirs: Mapping[str, Mapping[str, str]], mine: Mapping[str, str]) -> str:
    """Return which workers differ, and in what. A package that one side lacks may not be needed."""
    found = {}
    for worker, its in sorted(theirs.items()):
        both = [name for name in mine if name in its]
        found[worker] = differences({name: its[name] for name in both}, {name: mine[name] for name in both})
    return ", ".join(f"{worker} ({difference})" for worker, difference in found.items() if difference)


def differing_workers(client: Any) -> list[str]:
    """Return the warnings of `verify_access` at this time; none if a worker takes too long to answer."""
    if client is None:
        return []
    answers: dict[str, Any] = {}

    def ask() -> None:
        with suppress(Exception):
            question = Payload.of((None, "", ()), made_with=software())
            answers.update(client.run(_report, question, on_error="ignore"))

    thread = threading.Thread(target=ask, name="emtau-versions", daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    return _notes({worker: answer for worker, answer in answers.items() if isinstance(answer, _WorkerReport)})


def check_picklable(what: str, value: object) -> None:
    """Raise `ClusterError` if ``value`` cannot be sent to other processes."""
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        raise ClusterError(unsendable(f"{what} {type(value).__name__}", error)) from error


@contextmanager
def resident(client: Any, source: S) -> Iterator[S]:
    """Yield a source that is in this process's memory as one whose chunks other processes have.

    A cluster's workers get the array once and keep it until the end of the context;
    the scheduler has a copy for lost workers. Other processes get each chunk with
    its task. Any other source is unchanged, and so is None.
    """
    if not isinstance(source, RangeSource) or not source.in_memory or (client is None and in_process()):
        yield source
        return
    array = array_of_blocks(source, f"emtau-input-{uuid.uuid4().hex}")
    if client is None:
        yield cast("S", GraphSource(array, computed=False))
        return
    # dask warns of large graphs because mostly they are sent again and again.
    with cluster_errors(), dask.config.set({"distributed.admin.large-graph-warning-threshold": sys.maxsize}):
        kept = array.persist()
    try:
        yield cast("S", GraphSource(kept, computed=False))
    finally:
        for future in sys.modules["distributed"].client.futures_of(kept):
            future.release()
