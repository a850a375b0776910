"""Active rows are taken from a cache: the bits of the source, less of it read, nothing left after the fit."""

import threading
from dataclasses import dataclass

import dask
import numpy as np
import pytest
import zarr
from counting import Reads
from fits import assert_same_bits, quietly, resumed
from zarr.storage import LocalStore

from emtau_dask import ConfigError, EMLazy, EMStar, EMTau, FullEM, GaussianMixture
from emtau_dask.data import cache as rowcache
from emtau_dask.data.opening import as_source, open_source
from emtau_dask.em.memory import FitOutline, demand
from emtau_dask.em.settings import EmSettings
from emtau_dask.policies.policy import NextPass, Schedule
from emtau_dask.process import of_process
from emtau_dask.settings import Settings
from emtau_dask.storage.row_state import RowFields, RowStateRef

N, D, K, CHUNK = 2000, 3, 3, 250


def draw_rows():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(N, D)) + np.repeat([0.0, 2.5, 5.0, 5.0], N // 4)[:, None]
    return rng.permutation(rows)


ROWS = draw_rows()
WEIGHTS = np.random.default_rng(1).integers(0, 3, N).astype(float)


@dataclass(frozen=True)
class Tenth:
    """After the first iteration of every four a random tenth of the rows stays active."""

    cycle: int = 4

    def row_arrays(self, n_components, max_iter):
        return ()

    def update(self, state, evidence):
        n = len(evidence.labels)
        if (evidence.iteration - 1) % self.cycle:
            return state, np.ones(n, dtype=bool)
        seed = np.frombuffer(evidence.log_likelihoods.tobytes(), dtype="u4")
        return state, np.random.default_rng(seed).random(n) < 0.1

    def schedule(self, summary):
        full = summary.iteration % self.cycle == 0
        return Schedule(NextPass.ALL if full else NextPass.ACTIVE, test_tol=False)


def fit(X, algorithm, cache="256 MiB", scheduler="threads", max_iter=8, checkpoint=None, **fit_options):
    mixture = GaussianMixture(
        K,
        algorithm=algorithm,
        init_params="random_from_data",
        tol=0,
        max_iter=max_iter,
        random_state=0,
        checkpoint=checkpoint,
    )
    config = {"emtau.cache-bytes": cache, "num_workers": 2}
    if scheduler is not None:
        config["scheduler"] = scheduler
    with dask.config.set(config):
        return quietly(mixture, X, **fit_options)


def bytes_of(mixture):
    return [record.bytes_read for record in mixture.history_]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    zarr.create_array(store=path, data=ROWS, chunks=(CHUNK, D))
    return path


@pytest.fixture
def stored(path):
    return zarr.open_array(path, mode="r")


@pytest.fixture(autouse=True)
def scratch(tmp_path):
    """Dask's temporary folder; nothing is left in it, or in memory, when a test ends."""
    folder = tmp_path / "scratch"
    with dask.config.set({"temporary-directory": str(folder)}):
        yield folder
    assert not folder.exists() or list(folder.iterdir()) == []
    assert (of_process(rowcache.RowStore)._tokens, of_process(rowcache.RowStore)._bytes) == ({}, 0)


POLICIES = {
    "em-tau with revisits": EMTau(tau=2, revisit=5),
    "em-tau": EMTau(tau=3, revisit=None),
    "em-star": EMStar(),
    "em-star's tail": EMStar(tail=0.3, every=2),
    "em-lazy": EMLazy(threshold=0.9, full_every=4),
    "a tenth": Tenth(),
}

CASES = [
    *((name, False) for name in POLICIES),
    ("em-star", True),
    *(pytest.param(name, True, marks=pytest.mark.exhaustive) for name in ("em-tau with revisits", "em-lazy")),
]


class TestSameBits:
    @pytest.mark.parametrize(("name", "weighted"), CASES)
    def test_with_and_without_and_in_files(self, stored, name, weighted):
        weights = WEIGHTS if weighted else None
        without = fit(stored, POLICIES[name], cache=0, sample_weight=weights)
        for cache in ("256 MiB", "4 kB"):
            found = fit(stored, POLICIES[name], cache=cache, sample_weight=weights)
            assert_same_bits(found, without)
            assert sum(bytes_of(found)) < sum(bytes_of(without))
            rows = [[record.active_rows for record in each.history_] for each in (found, without)]
            assert rows[0] == rows[1]

    def test_with_stored_weights_and_rows_of_another_type(self, tmp_path):
        rows = zarr.create_array(store=tmp_path / "rows.zarr", data=ROWS.astype("f4"), chunks=(CHUNK, 1))
        weights = zarr.create_array(store=tmp_path / "weights.zarr", data=WEIGHTS, chunks=(CHUNK,))
        without, found = (fit(rows, Tenth(), cache, sample_weight=weights) for cache in (0, "256 MiB"))
        assert_same_bits(found, without)
        assert bytes_of(found)[1:4] == [0, 0, 0]

    def test_of_npy_files(self, tmp_path):
        np.save(tmp_path / "rows.npy", ROWS)
        X = open_source(str(tmp_path / "rows.npy")).aligned((CHUNK,) * (N // CHUNK))
        without, found = (fit(X, Tenth(), cache) for cache in (0, "256 MiB"))
        assert_same_bits(found, without)
        assert bytes_of(found)[1:4] == [0, 0, 0]

    def test_of_two_fits_at_once(self, stored):
        policies = [EMTau(tau=2, revisit=5), Tenth()]
        alone = [fit(stored, policy, cache=0) for policy in policies]
        found = [None, None]

        def work(i):
            found[i] = fit(stored, policies[i], cache="20 kB")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
        # dask's settings are the process's: of two threads the one that ends last would leave the other's.
        with dask.config.set({"emtau.cache-bytes": "20 kB", "num_workers": 2, "scheduler": "threads"}):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for one, other in zip(found, alone, strict=True):
            assert_same_bits(one, other)


class TestWhatIsRead:
    def test_no_chunk_of_which_a_tenth_is_active(self, path):
        store = Reads(LocalStore(path, read_only=True))
        X = as_source(zarr.open_array(store=store, mode="r"), ndim=2, what="X")
        fit(X, FullEM(), max_iter=0)
        at_the_start, store.chunks = store.chunks, ()
        mixture = fit(X, Tenth(), "256 MiB", "synchronous", max_iter=8)
        everywhere = list(range(N // CHUNK))
        assert sorted(store.chunks) == sorted(list(at_the_start) + 2 * everywhere)
        assert [record.chunks_processed for record in mixture.history_] == [len(everywhere)] * 8
        sizes = sum((path / "c" / str(chunk) / "0").stat().st_size for chunk in everywhere)
        assert bytes_of(mixture) == [sizes, 0, 0, 0] * 2

    def test_less_than_a_seventh_of_it_from_files(self, tmp_path):
        rows = np.tile(ROWS, (10, 1))
        stored = zarr.create_array(
            store=tmp_path / "rows.zarr", data=rows, chunks=(5000, D), compressors=None
        )
        full, *partial = bytes_of(fit(stored, Tenth(), cache=1, max_iter=4))
        assert all(0 < found < 0.15 * full for found in partial)

    def test_all_of_it_while_more_than_half_is_active(self, stored):
        without, found = (fit(stored, EMStar(tail=0.6), cache, max_iter=4) for cache in (0, "256 MiB"))
        assert bytes_of(found)[:2] == bytes_of(without)[:2]
        assert bytes_of(found)[2] == 0

    def test_all_of_it_from_memory(self):
        X = as_source(ROWS, ndim=2, what="X").aligned((CHUNK,) * (N // CHUNK))
        assert bytes_of(fit(X, Tenth(), max_iter=4)) == [ROWS.nbytes] * 4


class TestFailures:
    def test_a_disk_that_is_full(self, stored, monkeypatch):
        def full(folder, found):
            raise OSError(28, "No space left on device")

        without = fit(stored, Tenth(), cache=0)
        with monkeypatch.context() as patch:
            patch.setattr(rowcache._CachedFile, "write", full)
            found = fit(stored, Tenth(), cache=1)
        assert_same_bits(found, without)
        assert bytes_of(found) == bytes_of(without)

    @pytest.mark.parametrize("cache", ["256 MiB", 1])
    @pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
    def test_a_fit_that_fails_leaves_nothing(self, stored, cache, scheduler):
        class Failing(Tenth):
            def update(self, state, evidence):
                if evidence.iteration == 3:
                    assert of_process(rowcache.RowStore)._tokens
                    raise ArithmeticError("on purpose")
                return super().update(state, evidence)

        with pytest.raises(ArithmeticError, match="on purpose"):
            fit(stored, Failing(), cache, scheduler)

    def test_a_setting_that_is_no_number_of_bytes(self, stored, tmp_path):
        with pytest.raises(ConfigError, match=r"emtau\.cache-bytes"):
            fit(stored, Tenth(), cache="much", checkpoint=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def _kept():
    store = of_process(rowcache.RowStore)
    return len(store._tokens), store._bytes


@pytest.mark.cluster
def test_workers_keep_what_they_read_until_the_end(two_workers, path):
    without = fit(zarr.open_array(path, mode="r"), EMTau(tau=2, revisit=5), cache=0)
    for cache in ("256 MiB", 1):
        found = fit(zarr.open_array(path, mode="r"), EMTau(tau=2, revisit=5), cache, scheduler=None)
        assert_same_bits(found, without)
        assert sum(bytes_of(found)) < sum(bytes_of(without))
        assert set(two_workers.run(_kept).values()) == {(0, 0)}


class TestRowState:
    @pytest.fixture
    def reads(self, monkeypatch):
        """The chunks whose row state was read from where it is stored."""
        seen, read = [], RowStateRef.taken_from

        def noted(slot, values, n_rows, objects):
            seen.append(slot)
            return read(slot, values, n_rows, objects)

        monkeypatch.setattr(RowStateRef, "taken_from", noted)
        return seen

    @pytest.mark.parametrize("kind", ["stored", "in memory"])
    @pytest.mark.parametrize("name", ["em-tau with revisits", "em-star", "em-lazy", "a tenth"])
    def test_is_not_read_back_by_the_fit_that_wrote_it(self, kind, name, stored, reads):
        X = stored if kind == "stored" else as_source(ROWS, ndim=2, what="X").aligned((CHUNK,) * (N // CHUNK))
        found = fit(X, POLICIES[name])
        assert reads == []
        without = fit(X, POLICIES[name], cache=0)
        partial = [record for record in without.history_ if not record.full_pass]
        assert len(reads) >= sum(record.chunks_processed for record in partial) > 0
        assert_same_bits(found, without)

    def test_that_does_not_fit_is_read(self, stored, reads):
        found = fit(stored, Tenth(), cache=4 * (2 * CHUNK + 1), max_iter=4)
        assert len(reads) == 3 * (N // CHUNK - 2)
        assert_same_bits(found, fit(stored, Tenth(), cache=0, max_iter=4))

    def test_of_a_run_that_goes_on_is_read_once(self, stored, tmp_path, reads):
        whole = fit(stored, Tenth(), max_iter=4)
        fit(stored, Tenth(), max_iter=2, checkpoint=tmp_path / "checkpoint")
        assert len(reads) == N // CHUNK  # for the arrays that a fit leaves
        reads.clear()
        with dask.config.set({"scheduler": "threads", "num_workers": 2}):
            found = resumed(tmp_path / "checkpoint", stored, algorithm=Tenth(), max_iter=4)
        assert len(reads) == 2 * (N // CHUNK)
        assert_same_bits(found, whole)
        assert bytes_of(found)[2] > bytes_of(found)[3] == 0


class TestPrediction:
    FIELDS = RowFields(("active",), ("bool",), CHUNK)

    def of(self, X, fields, limit):
        outline = FitOutline(
            EmSettings(Settings(K), FullEM(), 0.0),
            fields=fields,
            threads=2,
            cache_limit=limit,
            read_ahead_limit=0,
        )
        return demand({"X": as_source(X, ndim=2, what="X")}, outline)

    def test_the_cache_is_part_of_it(self, tmp_path):
        X = zarr.create_array(store=tmp_path / "x.zarr", shape=(10**7, 16), dtype="f8", chunks=(10**6, 16))
        without = self.of(X, self.FIELDS, 0)
        assert without.cache == 0
        found = self.of(X, self.FIELDS, 2**28)
        assert found.cache == 2**28
        assert found.memory >= without.memory + 2**28

    def test_no_more_than_half_the_rows_and_their_state(self, stored):
        assert N // 2 * D * 8 + N <= self.of(stored, self.FIELDS, 2**28).cache <= N // 2 * (D + 1) * 8 + N

    def test_only_the_state_of_rows_in_memory(self):
        two = RowFields(("active", "counter"), ("bool", "uint16"), CHUNK)
        assert self.of(ROWS, self.FIELDS, 2**28).cache == N
        assert self.of(ROWS, two, 2**28).cache == 3 * N

    def test_nothing_where_there_is_none(self, stored):
        assert self.of(stored, None, 2**28).cache == 0
        assert self.of(ROWS, None, 2**28).cache == 0
