"""Row state of many small chunks: an object a task, whichever chunks share a task; counted, and resumed."""

import json
import warnings
from collections import Counter
from dataclasses import dataclass, field

import dask
import dask.array as da
import numpy as np
import pytest
from fits import assert_same_bits
from oracles import naive, policies
from sklearn.exceptions import ConvergenceWarning

from emtau_dask import CheckpointCorruptError, EMTau, GaussianMixture
from emtau_dask.checkpoint import reader
from emtau_dask.execution import graph
from emtau_dask.process import of_process
from emtau_dask.storage.commits import open_log
from emtau_dask.storage.objects import digest, digested_document
from emtau_dask.storage.row_state import RecentObjects
from emtau_dask.storage.stores import LocalObjects

CHUNKS, CHUNK_ROWS, D = 100, 7, 2
_random = np.random.default_rng(5)
ROWS = (
    _random.normal(size=(CHUNKS * CHUNK_ROWS, D)) + 3.0 * _random.integers(0, 2, CHUNKS * CHUNK_ROWS)[:, None]
)
X = da.from_array(ROWS, chunks=(CHUNK_ROWS, D))
NEVER = EMTau(tau=100, revisit=None)
START = {
    "weights_init": np.array([0.5, 0.5]),
    "means_init": np.array([[0.0, 0], [3, 3]]),
    "precisions_init": np.array([np.eye(D)] * 2),
}


@dataclass(frozen=True)
class Counted(LocalObjects):
    """A folder that notes which objects of row state are written and read."""

    puts: list = field(default_factory=list, compare=False)
    gets: list = field(default_factory=list, compare=False)

    def put(self, key, data):
        if "/rows/c." in key:
            self.puts.append(key)
        super().put(key, data)

    def get(self, key, limit):
        if "/rows/c." in key:
            self.gets.append(key)
        return super().get(key, limit)


def mixture(max_iter, policy=NEVER, **options):
    return GaussianMixture(
        2,
        algorithm=policy,
        tol=0,
        max_iter=max_iter,
        **START,
        **options,
    )


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore", ConvergenceWarning)
        yield


def chunks_a_task(monkeypatch, most):
    """Let a task take so many chunks at most."""
    monkeypatch.setattr(graph, "CHUNK_COST", 2**14)
    for name in ("MIN_BATCH_COST", "MAX_BATCH_COST"):
        monkeypatch.setattr(graph, name, (most + 0.5) * (2**14 + 2 * CHUNK_ROWS * D))


@pytest.mark.parametrize(("most", "tasks"), [(1, 100), (8, 13), (64, 2), (512, 1)])
def test_an_iteration_writes_an_object_for_each_task(tmp_path, monkeypatch, most, tasks):
    chunks_a_task(monkeypatch, most)
    objects = Counted(str(tmp_path / "run"))
    mixture(3, checkpoint=objects).fit(X)
    steps = Counter(map(step_of, objects.puts))
    assert list(steps.values()) == [tasks] * 3
    assert Counter(objects.gets) == Counter(objects.puts[-tasks:])  # for the arrays that a fit leaves


@pytest.mark.parametrize("before", [1, 8, 64, 512])
@pytest.mark.parametrize("after", [1, 8, 64])
def test_it_is_resumed_by_tasks_of_other_chunks(tmp_path, monkeypatch, before, after):
    """Where fewer chunks share a task than share an object, it is read for the first of them, and kept."""
    whole = mixture(6).fit(X)
    chunks_a_task(monkeypatch, before)
    objects = Counted(str(tmp_path / "run"))
    mixture(3, checkpoint=objects).fit(X)
    last = set(objects.puts[-len(objects.puts) // 3 :])
    of_process(RecentObjects)._recent.clear()  # as in another process
    chunks_a_task(monkeypatch, after)
    again = Counted(str(tmp_path / "run"))
    found = GaussianMixture.resume(again, X, max_iter=6)
    assert_same_bits(found, whole)
    left = again.puts[-len(again.puts) // 3 :]  # for the arrays that a fit leaves
    assert Counter(again.gets) == dict.fromkeys(last, 2) | dict.fromkeys(
        left, 1
    )  # All are verified, then read.


def test_a_chunk_is_written_by_the_iterations_that_score_rows_of_it(tmp_path):
    """Its state stays in the object of the last of them, whatever else is in that."""
    naively = naive.fit(ROWS, START, policies.EMTau(3, None), max_iter=8, reg_covar=1e-6)
    of_chunks = [mask.reshape(CHUNKS, CHUNK_ROWS).any(axis=1) for mask in naively.active]
    expected = [max(i for i, active in enumerate(of_chunks) if active[chunk]) for chunk in range(CHUNKS)]
    assert len(set(expected)) >= 3
    objects = Counted(str(tmp_path / "run"))
    mixture(8, EMTau(tau=3, revisit=None), checkpoint=objects).fit(X)
    steps = list(dict.fromkeys(step_of(key) for key in objects.puts))
    run = reader.read_newest(open_log(objects)).state.current
    assert [steps.index(step_of(run.row_state[chunk].object.key)) for chunk in range(CHUNKS)] == expected
    kept = {key for key in objects.list("attempts/") if "/rows/c." in key}
    assert {slot.object.key for slot in run.row_state.values()} <= kept


def step_of(key):
    return int(key.rsplit("/", 1)[1].split(".")[1])


class TestLies:
    """A checkpoint whose digests are all right, but not its table of chunks."""

    @pytest.fixture
    def lie(self, tmp_path):
        folder = tmp_path / "run"
        mixture(3, checkpoint=folder).fit(X)

        def told(alter, entry=lambda content: None):
            file = max(folder.glob("commits/*/zarr.json"), key=lambda path: int(path.parent.name))
            content = json.loads(file.read_bytes())["attributes"]
            del content["sha256"]
            ref = content["fit"]["current"]["chunks"]
            table = np.frombuffer((folder / ref["key"]).read_bytes(), "<i8").reshape(CHUNKS, 5).copy()
            alter(table)
            entry(content)
            (folder / ref["key"]).write_bytes(table.tobytes())
            ref["sha256"] = digest(table.tobytes())
            file.write_bytes(digested_document(content))
            for other in folder.glob("commits/*/zarr.json"):
                if other != file:
                    other.unlink()
            return GaussianMixture.resume(folder, X, max_iter=4)

        return told

    def test_none(self, lie):
        assert lie(lambda table: None).n_iter_ == 4

    @pytest.mark.parametrize(
        ("chunk", "column", "value"),
        [
            (5, 0, 1),
            (5, 2, -1),
            (5, 2, 6),
            (5, 2, CHUNKS),
            (5, 3, -1),
            (5, 3, 2**40),
            (5, 3, CHUNKS * CHUNK_ROWS - CHUNK_ROWS + 1),
            (5, 3, 5 * CHUNK_ROWS - 1),
            (5, 3, 4 * CHUNK_ROWS),
            (5, 4, CHUNK_ROWS + 1),
        ],
        ids=[
            "no such attempt",
            "a first chunk before all",
            "a first chunk after it",
            "a first chunk beyond all",
            "a row before all",
            "a row far beyond",
            "rows beyond the object",
            "rows of two chunks in common",
            "the rows of another chunk",
            "more active rows than rows",
        ],
    )
    def test_a_table_that_cannot_be_is_refused(self, lie, chunk, column, value):
        def alter(table):
            table[chunk, column] = value

        with pytest.raises(CheckpointCorruptError, match="table of chunks that is out of range"):
            lie(alter)

    def test_an_object_longer_than_chunks_need_is_refused_before_it_is_read(self, lie):
        def entry(content):
            content["attempts"][0]["object_rows"] = 10**12

        with pytest.raises(
            CheckpointCorruptError, match=r"object_rows is 1,000,000,000,000, where .* need 700 at most"
        ):
            lie(lambda table: None, entry)
