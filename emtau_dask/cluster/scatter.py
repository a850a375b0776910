"""What is sent to other processes before they run tasks, and whether it can be."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import cloudpickle

from emtau_dask.cluster.errors import cluster_errors, unsendable
from emtau_dask.cluster.scheduler import in_process
from emtau_dask.errors import ClusterError
from emtau_dask.io.sources import GraphSource, RangeSource, Source, array_of_blocks

S = TypeVar("S", bound=Source | None)


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
