"""What a fit will need, from shapes alone: memory in a process, bytes read, tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from emtau_dask.engine.chunks import loaded_bytes
from emtau_dask.engine.merge_tree import FAN_IN, batches_of
from emtau_dask.engine.problem import chunk_costs
from emtau_dask.engine.sampling import sample_size
from emtau_dask.mixture.covariance import structure_named
from emtau_dask.mixture.kernel import block_bytes
from emtau_dask.storage import RangeSource, RowFields, Source, is_stored
from emtau_dask.storage.zarr_source import READ_BUDGET

__all__ = ["FitDemand", "demand", "largest_chunk"]

PROCESS_BYTES = 280 * 10**6
"""The interpreter with every library that a fit loads, in a process of its own or a dask worker."""
FLOAT = 8
STATISTICS_HELD = 32
ROW_BYTES = 8 + 8 + 8 + 8 + 8 + 2
"""Of a row while its chunk is processed: positions twice, two values of evidence, its weight, masks."""
STATE_COPIES = 6
SAMPLE_COPIES = 6


@dataclass(frozen=True)
class FitDemand:
    """What a fit needs.

    Attributes
    ----------
    memory : int
        Bytes resident in one process, an upper bound; of graph sources only the
        engine's own part, and the chunks.
    largest_read : int
        Bytes that reading the longest chunk holds at once, of ``memory``.
    cache : int
        Bytes of active rows kept between passes, of ``memory``.
    read_ahead : int
        Bytes of chunks held before their tasks ask for them, of ``memory``.
    pass_bytes : int
        Decoded bytes of a pass over all rows.
    tasks : int
        Tasks of an iteration that scores every row, merges included.
    chunks : int
        Chunks that hold rows.
    complete : bool
        Whether ``memory`` covers all: False for graph sources, whose own tasks
        need what they need.
    """

    memory: int
    largest_read: int
    cache: int
    read_ahead: int
    pass_bytes: int
    tasks: int
    chunks: int
    complete: bool


def demand(
    sources: Mapping[str, Source],
    *,
    n_components: int,
    covariance_type: str,
    fields: RowFields | None,
    threads: int,
    cache_limit: int,
    read_ahead_limit: int,
) -> FitDemand:
    """Return what a fit of these sources needs.

    Parameters
    ----------
    sources : mapping of str to Source
        The rows under ``"X"``, and what is read beside them, in the same chunks.
    n_components : int
    covariance_type : str
    fields : RowFields or None
        The row state that the policy keeps.
    threads : int
        Chunks processed at a time in one process.
    cache_limit : int
        Bytes of active rows that the process may keep between passes.
    read_ahead_limit : int
        Bytes of chunks that the process may hold before their tasks ask for
        them; 0 where other processes run the tasks.
    """
    rows = sources["X"]
    longest = max(rows.chunk_rows, default=0)
    reading = sum(_reading(source) for source in sources.values())
    held = sum(_chunk_bytes(source, longest) for source in sources.values())
    beside = _beside(longest, rows.shape[1], n_components, covariance_type, fields)
    ahead = _ahead_bytes(sources, threads, read_ahead_limit)
    reads = 2 * threads if ahead else threads
    under_way = min(reads * (reading - held), max(READ_BUDGET.limit, reading))
    arrays = [source.in_memory for source in sources.values() if isinstance(source, RangeSource)]
    resident = sum(array.nbytes for array in arrays if array is not None)
    sample = SAMPLE_COPIES * sample_size(n_components, rows.shape[1]) * rows.shape[1] * FLOAT
    cached = 0 if fields is None else _cached_bytes(sources, rows.shape[0])
    to_cache = threads * _cached_bytes(sources, longest) if cached and cache_limit else 0
    working = max(threads * (held + beside) + max(0, under_way) + to_cache + ahead, sample)
    costs = chunk_costs(rows)
    batched = all(source.addressable for source in sources.values())
    leaves = {(0, chunk) for chunk in costs}
    if batched and costs:
        leaves = {(batch.level, batch.number) for batch in batches_of(costs)}
    return FitDemand(
        memory=PROCESS_BYTES + resident + working + min(cached, cache_limit),
        largest_read=reading,
        cache=min(cached, cache_limit),
        read_ahead=ahead,
        pass_bytes=sum(math.prod(source.shape) * source.dtype.itemsize for source in sources.values()),
        tasks=len(leaves) + _merges(leaves),
        chunks=len(costs),
        complete=batched,
    )


def _is_in_memory(source: Source) -> bool:
    return isinstance(source, RangeSource) and source.in_memory is not None


def _chunk_bytes(source: Source, n_rows: int) -> int:
    if _is_in_memory(source):
        return 0
    return n_rows * math.prod(source.shape[1:]) * source.dtype.itemsize


def _reading(source: Source) -> int:
    """Return the bytes held at once while the longest chunk is read, its rows included."""
    if not isinstance(source, RangeSource) or _is_in_memory(source):
        return _chunk_bytes(source, max(source.chunk_rows, default=0))
    found, start = 0, 0
    seen: set[int] = set()
    for size in source.chunk_rows:
        if size and size not in seen:
            seen.add(size)
            found = max(found, source.ranges.peak_bytes(start, start + size))
        start += size
    return found


def _beside(
    n_rows: int, n_features: int, n_components: int, covariance_type: str, fields: RowFields | None
) -> int:
    """Return the bytes that a task holds beside its chunk."""
    K, d = n_components, n_features
    blocks = block_bytes(covariance_type, K, d, n_rows)
    matrices = math.prod(structure_named(covariance_type).shape(K, d))
    statistics = STATISTICS_HELD * (matrices + K * (d + 1)) * FLOAT
    state = 0 if fields is None else n_rows * fields.stored.itemsize * len(fields.names) * STATE_COPIES
    return blocks + statistics + state + n_rows * ROW_BYTES


def _ahead_bytes(sources: Mapping[str, Source], threads: int, limit: int) -> int:
    """Return the most bytes that are held read ahead: a chunk for each thread, of those within the limit."""
    if not is_stored(sources["X"]) or not all(source.addressable for source in sources.values()):
        return 0
    sizes = loaded_bytes(list(sources.values())).values()
    return min(limit, threads * max((size for size in sizes if size <= limit), default=0))


def _cached_bytes(sources: Mapping[str, Source], n_rows: int) -> int:
    """Return the most bytes that are cached of some rows: half of them, with positions and weights."""
    rows = sources["X"]
    if not is_stored(rows):
        return 0
    return n_rows * (math.prod(rows.shape[1:]) * rows.dtype.itemsize + len(sources) * FLOAT) // 2


def _merges(leaves: set[tuple[int, int]]) -> int:
    """Return the number of merge tasks above the leaves of a pass."""
    merges, level, nodes = 0, 0, {number for depth, number in leaves if depth == 0}
    highest = max((depth for depth, _ in leaves), default=0)
    while len(nodes) > 1 or level < highest:
        groups: dict[int, int] = {}
        for number in nodes:
            groups[number // FAN_IN] = groups.get(number // FAN_IN, 0) + 1
        merges += sum(count > 1 for count in groups.values())
        level += 1
        nodes = set(groups) | {number for depth, number in leaves if depth == level}
    return merges


def largest_chunk(found: FitDemand, longest: int, limit: int) -> int:
    """Return about how many rows a chunk may have for a fit to stay within ``limit`` bytes, at least 0.

    What tasks hold is taken as proportional to their chunks' rows, less a tenth
    for what is not: blocks, statistics. Where chunks are too long to be read
    ahead, shorter ones may take twice as much, once loaded and once ahead.
    """
    fixed = PROCESS_BYTES + found.cache + found.read_ahead
    room, needed = limit - fixed, found.memory - fixed
    if not found.read_ahead:
        needed *= 2
    return max(0, int(0.9 * longest * room / needed)) if needed > 0 else longest
