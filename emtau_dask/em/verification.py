"""Verification that the data do not change: digests of chunks are compared between passes.

A task reports the digests of the chunks that it reads whole, with its result. The fitting process compares
them after the pass, before it uses the result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from emtau_dask.data.cache import CachedName
from emtau_dask.data.chunk import ROWS, ChunkDigest, ChunkLoader, LoadedChunk
from emtau_dask.data.source import NONE_UNSTORED, ChunkRange, Unstored
from emtau_dask.errors import CheckpointMismatchError, EmtauError, InvalidDataError, warn_user
from emtau_dask.execution.executor import Executor, MapReduce, PassObserver, ReadingTask

L = TypeVar("L")
T = TypeVar("T")
Digested = tuple[T, tuple[ChunkDigest, ...]]
"""A result, and the digests of the chunks that were read whole for it."""


class DigestingTask(ReadingTask[L, T]):
    """A task that reports the digests of the chunks that it reads whole."""

    @abstractmethod
    def digests(self, item: Any, found: L) -> Iterable[ChunkDigest]:
        """Return the digests of the chunks that ``read`` returned; called after ``compute``."""


@dataclass(frozen=True, eq=False)
class _Digesting(ReadingTask[L, "Digested[T]"]):
    task: DigestingTask[L, T]

    @property
    def cached_as(self) -> CachedName | None:
        return self.task.cached_as

    def is_cached(self, item: Any, state: Hashable) -> bool:
        return self.task.is_cached(item, state)

    def read(self, item: Any, *blocks: Any) -> L:
        return self.task.read(item, *blocks)

    def compute(self, item: Any, found: L) -> Digested[T]:
        result = self.task.compute(item, found)
        return result, tuple(self.task.digests(item, found))

    def finish(self, result: Digested[T]) -> Digested[T]:
        inner, digests = result
        return self.task.finish(inner), digests


def _merged(merge: Callable[[Iterable[T]], T], parts: Iterable[Digested[T]]) -> Digested[T]:
    digests: list[ChunkDigest] = []

    def result_of(part: Digested[T]) -> T:
        digests.extend(part[1])
        return part[0]

    return merge(map(result_of, parts)), tuple(digests)


class DataVerifier:
    """The digests of the chunks of a fit's sources, from earlier processes of its run and from this one.

    Parameters
    ----------
    stored : mapping of (str, str) to mapping of int to bytes
        Digests of a checkpoint, by source and ``made_on``, then by chunk.

    Attributes
    ----------
    known : mapping
        As ``stored``, with the digests of this process; a new object whenever there is a new chunk.
    notes : list of str
        Remarks for users, who have been warned of those that call for it.
    """

    def __init__(self, stored: Mapping[tuple[str, str], Mapping[int, bytes]] | None = None) -> None:
        self.known: Mapping[tuple[str, str], Mapping[int, bytes]] = dict(stored or {})
        self.notes: list[str] = []
        self._unstored: dict[str, dict[int, Unstored]] = {}
        self._compared: dict[str, set[int]] = {}
        self._counted: set[str] = set()

    def run(
        self, executor: Executor, work: MapReduce[T], observer: PassObserver, ranges: Mapping[int, ChunkRange]
    ) -> T | None:
        """Run a pass whose task is a `DigestingTask`, and compare the digests; see `compare`."""
        digesting: Any = replace(
            cast("MapReduce[Any]", work),
            task=_Digesting(cast("DigestingTask[Any, T]", work.task)),
            merge=partial(_merged, work.merge),
        )
        found = executor.map_reduce(digesting, observer)
        if found is None:
            return None
        result, digests = found
        self.compare(digests, ranges)
        return cast("T", result)

    def compare(self, found: Iterable[ChunkDigest], ranges: Mapping[int, ChunkRange]) -> None:
        """Compare the digests of chunks with earlier ones, and keep those of new chunks.

        Parameters
        ----------
        found : iterable of ChunkDigest
        ranges : mapping of int to ChunkRange
            The ranges of all chunks with rows.

        Raises
        ------
        CheckpointMismatchError
            A chunk has other values than in the run that is resumed.
        InvalidDataError
            It has other values than when this process first read it.

        Warns
        -----
        UserWarning
            A graph gave other values on another kind of CPU, or some chunks of a zarr array are not stored.
        """
        new: dict[tuple[str, str], dict[int, bytes]] = {}
        for one in found:
            self._compare(one, ranges[one.chunk])
            key = one.source, one.made_on
            if one.chunk not in self.known.get(key, {}):
                new.setdefault(key, {})[one.chunk] = one.digest
            self._unstored.setdefault(one.source, {})[one.chunk] = one.unstored
        if new:
            grown = {key: {**self.known.get(key, {}), **found} for key, found in new.items()}
            self.known = {**self.known, **grown}
        for source in self._unstored.keys() - self._counted:
            if len(self._unstored[source]) == len(ranges):
                self._counted.add(source)
                self._note_unstored(source)

    def not_read_again(self) -> str | None:
        """Return a remark on chunks that were not compared with their first digest; None if all were."""
        chunks = {chunk for (source, _), known in self.known.items() if source == ROWS for chunk in known}
        unread = len(chunks - self._compared.get(ROWS, set()))
        if not unread:
            return None
        return (
            f"{unread:,} of {len(chunks):,} chunks of {ROWS} were not read again: whether they still hold "
            "what was first read of them was not checked."
        )

    def _compare(self, one: ChunkDigest, where: ChunkRange) -> None:
        """Compare a chunk with its known digests; graphs may give other values on another kind of CPU."""
        for (source, made_on), known in self.known.items():
            then = known.get(one.chunk)
            if source != one.source or then is None:
                continue
            self._compared.setdefault(source, set()).add(one.chunk)
            if then == one.digest:
                continue
            if made_on == one.made_on or not (made_on and one.made_on):
                raise self._changed(one, then, where)
            here, there = sorted((made_on, one.made_on))
            self._note(
                f"the graph of {source} gave other values with {here} than with {there}: the last digits of "
                "results may differ from those of one kind of machine."
            )

    def _changed(self, one: ChunkDigest, then: bytes, where: ChunkRange) -> EmtauError:
        what = f"chunk {one.chunk} (rows {where.start} to {where.stop})"
        here = self._unstored.get(one.source, {}).get(one.chunk)
        error: type[EmtauError] = CheckpointMismatchError if here is None else InvalidDataError
        since = "in the checkpointed run" if here is None else "when this fit first read it"
        digests = f"its digest is {one.digest.hex()[:12]}…, it was {then.hex()[:12]}…"
        gone = one.unstored.chunks - (here or NONE_UNSTORED).chunks
        if here is not None and gone > 0:
            digests += f"; {gone} of its stored chunks are gone, which zarr reads as {one.unstored.value}"
        if one.made_on:
            return error(
                f"{one.source} holds other values than {since}: your graph gave other values for {what}, on "
                f"the same kind of CPU ({digests}). It must give the same values each time: store what it "
                "computes, for example with dask.array.to_zarr, and fit that."
            )
        remedy = "Give the same data, or begin a new run with this."
        if here is not None:
            remedy = "Restore it and resume the run, if it has a checkpoint, or fit again."
        return error(f"{one.source} holds other values than {since}: {what} changed ({digests}). {remedy}")

    def _note_unstored(self, source: str) -> None:
        chunks, of, value = reduce(Unstored.and_those, self._unstored[source].values())
        if chunks:
            text = f"{chunks:,} of {of:,} chunks of {source} are not stored: zarr reads them as {value}"
            self._note(text, warn=chunks < of)

    def _note(self, text: str, *, warn: bool = True) -> None:
        if text not in self.notes:
            self.notes.append(text)
            if warn:
                warn_user(text)


class ChunkTask(DigestingTask[LoadedChunk, T]):
    """A task that reads one whole chunk, and nothing else."""

    loader: ChunkLoader

    def read(self, item: ChunkRange, *blocks: Sequence[NDArray[Any]]) -> LoadedChunk:
        """Return the chunk."""
        return self.loader.load(item, *blocks)

    def digests(self, item: Any, found: LoadedChunk) -> tuple[ChunkDigest, ...]:
        """Return its digest."""
        return found.digests()
