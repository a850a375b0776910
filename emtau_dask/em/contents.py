"""What chunks hold, compared between passes: another digest means that the data changed.

Tasks report the digests of the chunks that they read whole with their results, and the process that fits
compares them once the pass is over, before anything of it is used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeVar, cast

from numpy.typing import NDArray

from emtau_dask.data.chunk import ROWS, ChunkContents, ChunkLoader, LoadedChunk
from emtau_dask.data.source import NONE_UNSTORED, ChunkRange, Unstored
from emtau_dask.errors import CheckpointMismatchError, EmtauError, InvalidDataError, warn_user
from emtau_dask.execution.executor import Executor, MapReduce, PassObserver, ReadingTask

L = TypeVar("L")
T = TypeVar("T")
Noted = tuple[T, tuple[ChunkContents, ...]]
"""A result, and the contents of the chunks that were read whole for it."""


class NotingTask(ReadingTask[L, T]):
    """A task that reports what the chunks hold that it reads whole."""

    @abstractmethod
    def contents(self, item: Any, found: L) -> Iterable[ChunkContents]:
        """Return the contents of the chunks in what ``read`` returned; called after ``compute``."""


@dataclass(frozen=True, eq=False)
class _Noting(ReadingTask[L, "Noted[T]"]):
    task: NotingTask[L, T]

    def read(self, item: Any, *blocks: Any) -> L:
        return self.task.read(item, *blocks)

    def compute(self, item: Any, found: L) -> Noted[T]:
        result = self.task.compute(item, found)
        return result, tuple(self.task.contents(item, found))

    def finish(self, result: Noted[T]) -> Noted[T]:
        inner, contents = result
        return self.task.finish(inner), contents


def _merged(merge: Callable[[Iterable[T]], T], parts: Iterable[Noted[T]]) -> Noted[T]:
    contents: list[ChunkContents] = []

    def result_of(part: Noted[T]) -> T:
        contents.extend(part[1])
        return part[0]

    return merge(map(result_of, parts)), tuple(contents)


class Contents:
    """What the chunks of a fit's sources hold: known from earlier processes of its run, or from this one.

    Parameters
    ----------
    stored : mapping of (str, str) to mapping of int to bytes
        Digests by source and by ``made_on``, then by chunk, as a checkpoint has them.

    Attributes
    ----------
    known : mapping
        As ``stored``, with those that this process found; new chunks make another object.
    notes : list of str
        What users should know, of which they have been warned where that is called for.
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
        """Run a pass whose task is a `NotingTask`, and compare what it found in chunks; see `compare`."""
        noting: Any = replace(
            cast("MapReduce[Any]", work),
            task=_Noting(cast("NotingTask[Any, T]", work.task)),
            merge=partial(_merged, work.merge),
        )
        found = executor.map_reduce(noting, observer)
        if found is None:
            return None
        result, contents = found
        self.compare(contents, ranges)
        return cast("T", result)

    def compare(self, found: Iterable[ChunkContents], ranges: Mapping[int, ChunkRange]) -> None:
        """Compare the contents of chunks with what they held before, and remember those of new ones.

        Parameters
        ----------
        found : iterable of ChunkContents
        ranges : mapping of int to ChunkRange
            Of all chunks of the sources that hold rows.

        Raises
        ------
        CheckpointMismatchError
            A chunk holds other values than in the run that is resumed.
        InvalidDataError
            It holds other values than when this process first read it.

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
        """Return which chunks were not compared with what was first read of them; None where all were."""
        chunks = {chunk for (source, _), known in self.known.items() if source == ROWS for chunk in known}
        left = len(chunks - self._compared.get(ROWS, set()))
        if not left:
            return None
        return (
            f"{left:,} of {len(chunks):,} chunks of {ROWS} were not read again: whether they still hold what "
            "was first read of them was not checked."
        )

    def _compare(self, one: ChunkContents, where: ChunkRange) -> None:
        """Compare a chunk with all that is known of it; what graphs gave on two kinds of CPU may differ."""
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
                f"the graph of {source} gave other values with {here} than with {there}: the last bits of "
                "results may differ from those of one kind of machine."
            )

    def _changed(self, one: ChunkContents, then: bytes, where: ChunkRange) -> EmtauError:
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


class ChunkTask(NotingTask[LoadedChunk, T]):
    """A task that reads one whole chunk, and nothing else."""

    loader: ChunkLoader

    def read(self, item: ChunkRange, *blocks: Sequence[NDArray[Any]]) -> LoadedChunk:
        """Return the chunk."""
        return self.loader.load(item, *blocks)

    def contents(self, item: Any, found: LoadedChunk) -> tuple[ChunkContents, ...]:
        """Return what it holds."""
        return found.contents()
