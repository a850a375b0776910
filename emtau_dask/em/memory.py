"""The memory, bytes read and tasks of a fit, predicted from shapes alone; the size of the cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

from emtau_dask.dask_config import AUTO, read_settings
from emtau_dask.data.chunk import loaded_bytes
from emtau_dask.data.source import RangeSource, Source, is_in_memory, is_stored
from emtau_dask.data.zarr_arrays import READ_BYTES
from emtau_dask.em.fit import FitSources
from emtau_dask.em.problem import chunk_costs
from emtau_dask.em.sampling import sample_size
from emtau_dask.em.settings import EmSettings
from emtau_dask.em.state_store import row_fields
from emtau_dask.execution.executor import Executor
from emtau_dask.execution.graph import FAN_IN, MAX_CHUNKS, batches_of
from emtau_dask.execution.scheduler import task_processes
from emtau_dask.mixture.covariance_types import structure_named
from emtau_dask.mixture.missing import LONGER, PATTERNS_BYTES
from emtau_dask.mixture.plan import block_bytes
from emtau_dask.settings import marginalises
from emtau_dask.storage.row_state import RECENT_BYTES, SHARING_ROWS, RowFields

PROCESS_BYTES = 300 * 10**6
"""Resident bytes of the interpreter with all libraries of a fit, in a process of its own or a dask worker.

They include 15 MB for compiling modules to bytecode, which a new environment does.
"""
COMPILER_BYTES = 150 * 10**6
"""Resident bytes of numba, LLVM and compiled code, if a fit uses compiled loops."""
FLOAT_BYTES = 8
STATISTICS_COPIES, STATE_COPIES, OBJECT_COPIES, SAMPLE_COPIES = 32, 6, 4, 6
"""Maximum copies at a time: of statistics, row state, objects of row state, and the sample of a start."""
ROW_BYTES = 8 + 8 + 8 + 8 + 8 + 2
"""Bytes of a row while its chunk is processed: two positions, two scores, weight and masks."""
READING_SLACK = 2**22
"""Bytes that a read may take in addition to those in proportion to its rows."""
CACHE_DIVISOR = 5
"""Default share of the memory for cached rows and row state: one fifth."""
MIN_CACHE_BYTES = 2**20
"""Minimum size of the cache (bytes). Rows that do not fit go to files, which need a cache too."""
DEFAULT_CACHE_BYTES = 2**25
"""Size of the cache (bytes) if the memory is not known because the cluster has no workers yet."""


@dataclass(frozen=True)
class FitDemand:
    """The resources that a fit needs.

    Attributes
    ----------
    memory : int
        Upper bound of the resident bytes of one process, without the tasks of graph sources.
    largest_read : int
        Bytes of ``memory`` that are in use while the longest chunk is read.
    cache : int
        Bytes of ``memory`` for active rows and row state between passes.
    read_ahead : int
        Bytes of ``memory`` for chunks that are read ahead.
    pass_bytes : int
        Decoded bytes of a pass over all rows.
    tasks : int
        Tasks of an iteration that scores every row, merges included.
    chunks : int
        Chunks with rows.
    complete : bool
        Whether ``memory`` covers everything. It is False for graph sources, whose own tasks need an unknown
        amount.
    """

    memory: int
    largest_read: int
    cache: int
    read_ahead: int
    pass_bytes: int
    tasks: int
    chunks: int
    complete: bool


@dataclass(frozen=True)
class FitOutline:
    """The arguments of a fit's demand besides its data.

    Attributes
    ----------
    settings : EmSettings
    fields : RowFields or None
        The row state that the policy keeps.
    threads : int
        Chunks processed at a time in one process.
    cache_limit : int
        Maximum bytes of active rows and row state between passes.
    read_ahead_limit : int
        Maximum bytes of chunks that are read ahead; 0 if other processes run the tasks.
    """

    settings: EmSettings
    fields: RowFields | None
    threads: int
    cache_limit: int
    read_ahead_limit: int


def demand(sources: Mapping[str, Source], outline: FitOutline) -> FitDemand:
    """Return the demand of a fit; ``sources`` are the rows, ``"X"``, and others in the same chunks."""
    rows = sources["X"]
    reading = sum(_reading(source) for source in sources.values())
    costs = chunk_costs(rows)
    batched = all(source.addressable for source in sources.values())
    leaves = {(0, chunk) for chunk in costs}
    if batched and costs:
        leaves = {(batch.level, batch.number) for batch in batches_of(costs)}
    return FitDemand(
        memory=_memory(sources, outline, rows.chunk_rows, reading),
        largest_read=reading,
        cache=_cached(sources, outline),
        read_ahead=_ahead_bytes(sources, outline, rows.chunk_rows),
        pass_bytes=sum(map(_bytes, sources.values())),
        tasks=len(leaves) + _merges(leaves),
        chunks=len(costs),
        complete=batched,
    )


def _memory(
    sources: Mapping[str, Source], outline: FitOutline, chunk_rows: Sequence[int], reading: int
) -> int:
    """Return the bytes that a process needs; ``reading`` are those while the longest chunk is read."""
    rows, threads, requested = sources["X"], outline.threads, outline.settings.requested
    K, covariance_type = requested.n_components, requested.covariance_type
    longest = max(chunk_rows, default=0)
    loaded = sum(_chunk_bytes(source, longest) for source in sources.values())
    working = _working_bytes(longest, rows.shape[1], K, covariance_type, outline.fields)
    working += _shared_state(chunk_rows, outline.fields)
    process = PROCESS_BYTES + (COMPILER_BYTES if outline.settings.compiled else 0)
    process += _recent_state(chunk_rows, outline.fields)
    if marginalises(requested.missing):
        working += LONGER * block_bytes(covariance_type, K, rows.shape[1], longest)
        process += PATTERNS_BYTES
    ahead = _ahead_bytes(sources, outline, chunk_rows)
    being_read = threads * loaded + min(ahead, threads * loaded)
    buffers = being_read * max(0, reading - loaded) // loaded if loaded else 0
    buffers = min(buffers, max(READ_BYTES, reading))
    resident = sum(_bytes(source) for source in sources.values() if is_in_memory(source))
    sample = SAMPLE_COPIES * sample_size(K, rows.shape[1]) * rows.shape[1] * FLOAT_BYTES
    cached = _cached(sources, outline)
    to_cache = threads * _cached_bytes(sources, outline.fields, longest) if cached else 0
    tasks = threads * (loaded + working) + buffers + to_cache + ahead
    return process + resident + max(tasks, sample) + cached


def largest_chunk(sources: Mapping[str, Source], outline: FitOutline, limit: int) -> int:
    """Return the maximum rows of a chunk with which a fit stays within ``limit`` bytes; 0 if there is none.

    It tries lengths in steps of a twentieth, and assumes that a read takes as many bytes per row as now.
    """
    longest = max(sources["X"].chunk_rows, default=0)
    reading = sum(_reading(source) for source in sources.values())

    def needed(rows: int) -> int:
        whole, rest = divmod(sources["X"].shape[0], rows)
        chunks = (*[rows] * min(whole, outline.threads), rest)
        return _memory(sources, outline, chunks, READING_SLACK + reading * rows // longest)

    rows = longest
    while rows and needed(rows) > limit:
        rows = rows * 19 // 20
    return rows


def _bytes(source: Source) -> int:
    return math.prod(source.shape) * source.dtype.itemsize


def _chunk_bytes(source: Source, n_rows: int) -> int:
    if is_in_memory(source):
        return 0
    return n_rows * math.prod(source.shape[1:]) * source.dtype.itemsize


def _reading(source: Source) -> int:
    """Return the bytes in use while the longest chunk is read, its rows included."""
    if not isinstance(source, RangeSource) or is_in_memory(source):
        return _chunk_bytes(source, max(source.chunk_rows, default=0))
    found, start = 0, 0
    seen: set[int] = set()
    for size in source.chunk_rows:
        if size and size not in seen:
            seen.add(size)
            found = max(found, source.ranges.peak_bytes(start, start + size))
        start += size
    return found


def _working_bytes(
    n_rows: int, n_features: int, n_components: int, covariance_type: str, fields: RowFields | None
) -> int:
    """Return the bytes that a task uses in addition to its chunk."""
    K, d = n_components, n_features
    blocks = block_bytes(covariance_type, K, d, n_rows)
    matrices = math.prod(structure_named(covariance_type).shape(K, d))
    statistics = STATISTICS_COPIES * (matrices + K * (d + 1)) * FLOAT_BYTES
    state = 0 if fields is None else n_rows * fields.stored.itemsize * len(fields.names) * STATE_COPIES
    return blocks + statistics + state + n_rows * ROW_BYTES


def _shared_state(chunk_rows: Sequence[int], fields: RowFields | None) -> int:
    """Return the bytes of row state in a task before it writes that of all its chunks at once."""
    sharing = [rows for rows in chunk_rows if rows <= SHARING_ROWS]
    if fields is None or not any(sharing):
        return 0
    rows = min(sum(sharing), MAX_CHUNKS * max(sharing))
    unwritten = rows * sum(dtype.itemsize for dtype in fields.by_name.values())
    return unwritten + OBJECT_COPIES * fields.nbytes


def _recent_state(chunk_rows: Sequence[int], fields: RowFields | None) -> int:
    """Return the maximum bytes of the decoded objects that a process caches: one for each small chunk."""
    if fields is None:
        return 0
    return min(RECENT_BYTES, sum(rows <= SHARING_ROWS for rows in chunk_rows) * fields.nbytes)


def _ahead_bytes(sources: Mapping[str, Source], outline: FitOutline, chunk_rows: Sequence[int]) -> int:
    """Return the maximum bytes that are read ahead: the largest chunks within the limit, one per thread."""
    if not is_stored(sources["X"]) or not all(source.addressable for source in sources.values()):
        return 0
    limit = outline.read_ahead_limit
    sizes = loaded_bytes(list(sources.values()), chunk_rows).values()
    return min(limit, sum(nlargest(outline.threads, (size for size in sizes if size <= limit))))


def _cached(sources: Mapping[str, Source], outline: FitOutline) -> int:
    """Return the maximum bytes that are cached between passes."""
    rows = sources["X"]
    samples = int(sum(outline.settings.shares) * rows.shape[0]) * _cached_row_bytes(sources)
    return min(outline.cache_limit, _cached_bytes(sources, outline.fields, rows.shape[0]) + samples)


def _cached_row_bytes(sources: Mapping[str, Source]) -> int:
    """Return the bytes of a cached row, with its position and its weight."""
    rows = sources["X"]
    return math.prod(rows.shape[1:]) * rows.dtype.itemsize + len(sources) * FLOAT_BYTES


def _cached_bytes(sources: Mapping[str, Source], fields: RowFields | None, n_rows: int) -> int:
    """Return the maximum bytes that are cached for rows, whatever the size of the cache.

    These are the state of all rows and, if rows are stored, half of them with positions and weights.
    """
    if fields is None:
        return 0
    rows = sources["X"]
    state = n_rows * sum(dtype.itemsize for dtype in fields.by_name.values())
    if not is_stored(rows):
        return state
    return state + n_rows * _cached_row_bytes(sources) // 2


def _merges(leaves: set[tuple[int, int]]) -> int:
    """Return the number of merge tasks above the leaves of a pass."""
    merges, level, nodes = 0, 0, {number for depth, number in leaves if depth == 0}
    highest = max((depth for depth, _ in leaves), default=0)
    while len(nodes) > 1 or level < highest:
        groups = Counter(number // FAN_IN for number in nodes)
        merges += sum(count > 1 for count in groups.values())
        level += 1
        nodes = set(groups) | {number for depth, number in leaves if depth == level}
    return merges


def automatic_cache(sources: Mapping[str, Source], outline: FitOutline, memory: int) -> int:
    """Return the size of the cache (bytes) of a process that may use ``memory`` bytes in all.

    It is a fifth of ``memory``, or less if the rest of the fit leaves less.

    Parameters
    ----------
    sources : mapping of str to Source
        As for `demand`.
    outline : FitOutline
        Its ``cache_limit`` is ignored.
    memory : int
    """
    least = demand(sources, replace(outline, cache_limit=MIN_CACHE_BYTES))
    return max(MIN_CACHE_BYTES, min(memory // CACHE_DIVISOR, memory - least.memory + least.cache))


def outline_of(settings: EmSettings, rows: Source, *, threads: int, in_process: bool) -> FitOutline:
    """Return the outline of a fit without a cache."""
    fields = row_fields(rows, settings.requested.n_components, settings.policy, settings.max_iter)
    ahead = read_settings().read_ahead_bytes if in_process else 0
    return FitOutline(settings, fields, threads, cache_limit=0, read_ahead_limit=ahead)


def cache_bytes(settings: EmSettings, sources: FitSources, executor: Executor) -> int:
    """Return the size of the cache of each process (bytes); 0 for no cache.

    Dask's ``emtau.cache-bytes`` decides; for "auto" see `automatic_cache`.
    """
    setting = read_settings().cache_bytes
    outline = outline_of(settings, sources.rows, threads=1, in_process=executor.in_process)
    if outline.fields is None and not settings.shares:
        return 0
    if setting != AUTO:
        return setting
    found = task_processes(executor.client)
    if found is None:
        return DEFAULT_CACHE_BYTES
    memory, threads = found
    return automatic_cache(sources.named(), replace(outline, threads=threads), memory)
