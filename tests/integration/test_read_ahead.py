"""Fits that read ahead: overlap proved by events, the bits and reads of one that does not, nothing left."""

import threading
import warnings
from dataclasses import dataclass, field

import dask
import numpy as np
import pytest
import zarr
from counting import Reads, one_chunk_a_task
from fits import assert_same_bits
from sklearn.exceptions import ConvergenceWarning
from zarr.storage import LocalStore

from emtau_dask import ConfigError, EMLazy, EMStar, EMTau, FullEM, GaussianMixture, InvalidDataError
from emtau_dask.data.opening import as_source
from emtau_dask.data.source import Loaded, RangeReader, RangeSource
from emtau_dask.em.memory import FitOutline, demand, largest_chunk
from emtau_dask.em.settings import EmSettings
from emtau_dask.settings import Settings
from emtau_dask.storage.row_state import RowFields

N, D, K, CHUNK = 1200, 3, 3, 100
CHUNKS = (CHUNK,) * (N // CHUNK)
PATIENCE = 30.0
"""Seconds after which a test that waits in vain gives up."""
ROWS = np.random.default_rng(0).normal(size=(N, D)) + np.repeat([0.0, 2.5, 5.0, 5.0], N // 4)[:, None]
ROWS = np.random.default_rng(1).permutation(ROWS)
START = {
    "weights_init": np.full(K, 1 / K),
    "means_init": ROWS[:K],
    "precisions_init": np.tile(np.eye(D), (K, 1, 1)),
}


def fit(X, algorithm="em", ahead="64 MiB", threads=1, max_iter=3, **fit_options):
    mixture = GaussianMixture(K, algorithm=algorithm, tol=0, max_iter=max_iter, random_state=0, **START)
    settings = {"emtau.read-ahead-bytes": ahead, "scheduler": "threads", "num_workers": threads}
    with warnings.catch_warnings(), dask.config.set(settings):
        warnings.simplefilter("ignore", ConvergenceWarning)
        return mixture.fit(X, **fit_options)


@pytest.fixture(autouse=True)
def no_reader_is_left():
    yield
    assert [each for each in threading.enumerate() if each.name.startswith("emtau-read-ahead")] == []


@pytest.fixture(params=["in batches", "one by one"])
def batching(request):
    if request.param == "in batches":
        yield
    else:
        with one_chunk_a_task():
            yield


@dataclass
class Ranges(RangeReader):
    """Reads rows of an array as if they were stored, and tells of it."""

    on_read: object
    readers: list = field(default_factory=list)

    def read(self, start, stop):
        chunk = start // CHUNK
        self.readers.append((chunk, threading.current_thread().name))
        self.on_read(chunk)
        rows = ROWS[start:stop].copy()
        return Loaded(rows, rows.nbytes)

    def identity(self):
        return "rows of a test"

    def peak_bytes(self, start, stop):
        return (stop - start) * D * 8

    @property
    def ahead(self):
        return [chunk for chunk, name in self.readers if name.startswith("emtau-read-ahead")]


def source_of(on_read=lambda chunk: None):
    ranges = Ranges(on_read)
    return RangeSource(ranges, ROWS.shape, ROWS.dtype, CHUNKS), ranges


@dataclass(frozen=True)
class Telling:
    """EM that tells of every chunk whose scoring goes on; `update` runs in the chunk's task."""

    scoring: object

    def row_arrays(self, n_components, max_iter):
        return ()

    def update(self, state, evidence):
        self.scoring()
        return state, np.ones(len(evidence.labels), dtype=bool)

    def schedule(self, summary):
        return FullEM().schedule(summary)


@pytest.mark.usefixtures("batching")
def test_a_chunk_is_read_while_the_one_before_it_is_scored():
    """Scoring of a chunk ends only once another read has begun, which ends only after scoring began.

    The chunks' order is the scheduler's, so they are told apart by how many were before them.
    """
    last = len(CHUNKS) - 1
    begun, scoring = ([threading.Event() for _ in CHUNKS] for _ in range(2))
    reads, scorings = iter(range(len(CHUNKS))), iter(range(len(CHUNKS)))

    def on_read(chunk):
        turn = next(reads)
        begun[turn].set()
        assert turn == 0 or scoring[turn - 1].wait(PATIENCE)

    def on_scoring():
        turn = next(scorings)
        scoring[turn].set()
        assert turn == last or begun[turn + 1].wait(PATIENCE)

    X, ranges = source_of(on_read)
    fit(X, Telling(on_scoring), max_iter=1)
    assert len(ranges.ahead) == last


@pytest.mark.parametrize("ahead", [0, CHUNK * D * 8])
def test_nothing_is_read_ahead_without_room_for_it(ahead):
    X, ranges = source_of()
    fit(X, ahead=ahead)
    assert len(ranges.readers) == 3 * len(CHUNKS)
    assert ranges.ahead == []


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    zarr.create_array(store=path, data=ROWS, chunks=(CHUNK, D))
    return path


POLICIES = [
    FullEM(),
    EMTau(tau=2, revisit=5),
    EMTau(tau=3, revisit=None),
    EMStar(),
    EMLazy(0.9, full_every=4),
]


@pytest.mark.usefixtures("batching")
@pytest.mark.parametrize("algorithm", POLICIES, ids=str)
@pytest.mark.parametrize("cache", [0, "256 MiB"])
def test_the_bits_and_the_reads_are_those_without(path, algorithm, cache):
    weights = np.random.default_rng(1).integers(0, 3, N).astype(float)

    def found(ahead, threads):
        store = Reads(LocalStore(path, read_only=True))
        X = as_source(zarr.open_array(store=store, mode="r"), ndim=2, what="X")
        with dask.config.set({"emtau.cache-bytes": cache}):
            mixture = fit(X, algorithm, ahead, threads, max_iter=7, sample_weight=weights)
        return (
            mixture,
            [(record.bytes_read, record.chunks_processed) for record in mixture.history_],
            store.chunks,
        )

    without, work, read = found(0, 1)
    for threads in (1, 2):
        with_it, same_work, same_read = found("64 MiB", threads)
        assert_same_bits(with_it, without)
        assert same_work == work
        assert sorted(same_read) == sorted(read)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ahead", [0, "64 MiB"])
def test_a_read_that_fails_is_the_same_error(threads, ahead):
    def on_read(chunk):
        if chunk == 7:
            raise InvalidDataError("chunk 7 is damaged")

    X, _ = source_of(on_read)
    with pytest.raises(InvalidDataError, match=r"^chunk 7 is damaged$"):
        fit(X, threads=threads, ahead=ahead)


@pytest.mark.parametrize("threads", [1, 2])
def test_an_interrupt_leaves_no_reader(threads):
    begun = threading.Event()

    def on_read(chunk):
        if threading.current_thread().name.startswith("emtau-read-ahead"):
            begun.set()

    def scoring():
        assert begun.wait(PATIENCE)
        raise KeyboardInterrupt

    X, _ = source_of(on_read)
    with pytest.raises(KeyboardInterrupt):
        fit(X, Telling(scoring), threads=threads)


@pytest.mark.parametrize("value", ["much", -1, True, None])
def test_a_setting_that_is_no_number_of_bytes(path, value):
    with pytest.raises(ConfigError, match=r"emtau\.read-ahead-bytes"):
        fit(zarr.open_array(path, mode="r"), ahead=value)


class TestPrediction:
    def of(self, X, limit, threads=2):
        outline = FitOutline(
            EmSettings(Settings(K), FullEM(), 0.0),
            fields=None,
            threads=threads,
            cache_limit=0,
            read_ahead_limit=limit,
        )
        return demand({"X": as_source(X, ndim=2, what="X")}, outline)

    @pytest.fixture
    def large(self, tmp_path):
        return zarr.create_array(store=tmp_path / "x.zarr", shape=(10**7, 16), dtype="f8", chunks=(10**5, 16))

    @pytest.mark.parametrize("compressors", ["auto", None])
    @pytest.mark.parametrize("threads", [1, 2, 8])
    @pytest.mark.parametrize("limit", [450 * 10**6, 10**9, 3 * 10**9])
    def test_chunks_as_long_as_it_says_fit_and_somewhat_longer_ones_do_not(
        self, tmp_path, compressors, threads, limit
    ):
        """Where a fit is beyond its limit, it says how long chunks may be: written so, it is within."""

        def outlined(rows):
            path = tmp_path / f"{rows}.zarr"
            stored = zarr.create_array(
                store=path, shape=(10**8, 16), dtype="f8", chunks=(rows, 16), compressors=compressors
            )
            outline = FitOutline(
                EmSettings(Settings(4), FullEM(), 0.0),
                RowFields(("active",), ("bool",), rows),
                threads,
                2**27,
                2**26,
            )
            return {"X": as_source(stored, ndim=2, what="X")}, outline

        rows = largest_chunk(*outlined(2 * 10**7), limit)
        if rows == 0:
            assert demand(*outlined(1000)).memory > limit
            return
        assert demand(*outlined(rows)).memory <= limit
        assert any(demand(*outlined(round(rows * longer))).memory > limit for longer in (1.1, 1.2, 1.3))

    def test_a_chunk_for_each_thread_is_part_of_it(self, large):
        chunk = 10**5 * 16 * 8
        for threads in (1, 2, 3):
            without, found = (self.of(large, limit, threads) for limit in (0, 2**26))
            assert without.read_ahead == 0
            assert threads * chunk <= found.read_ahead <= 1.2 * threads * chunk
            assert found.memory >= without.memory + found.read_ahead

    def test_no_more_than_the_limit(self, large):
        assert self.of(large, 2**26, 16).read_ahead == 2**26

    def test_nothing_of_chunks_that_are_larger(self, large):
        assert self.of(large, 10**7) == self.of(large, 0)

    def test_nothing_of_rows_in_memory(self):
        assert self.of(ROWS, 2**26).read_ahead == 0
