"""What a fit tells those who watch it: chunks within a pass, the log, and nothing to who did not ask."""

import json
import logging
import time
import warnings
from collections import defaultdict

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import processes
from commands import emtau
from fits import ROWS, START, mixture, quietly

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator.fitting import fit_estimator
from emtau_dask.execution import dask_graph

CHUNKS = 20


class Events(SilentObserver):
    """The chunks of each pass, and what was told of them, report by report."""

    def __init__(self):
        self.stages, self.reports = [], defaultdict(list)

    def stage(self, name, chunks):
        self.stages.append((name, chunks))

    def chunks_done(self, count):
        self.reports[len(self.stages) - 1].append(count)


def slowly(block):
    time.sleep(0.05)
    return block


def watched(X):
    events = Events()
    settings = {"algorithm": "em", "max_iter": 1, "tol": 0}
    fit_estimator(mixture(**settings, **START), X, None, None, observer=events)
    for number, (_, chunks) in enumerate(events.stages):
        assert sum(events.reports[number]) == chunks
    return events.reports[[name for name, _ in events.stages].index("iteration 1")]


def test_progress_moves_with_chunks_on_threads():
    with dask.config.set(scheduler="threads"):
        reports = watched(da.from_array(ROWS, chunks=(len(ROWS) // CHUNKS, 2)).map_blocks(slowly))
    assert reports == [1] * CHUNKS


@pytest.mark.cluster
def test_progress_moves_with_chunks_on_a_cluster(zygote, tmp_path, monkeypatch):
    monkeypatch.setattr(dask_graph, "PROGRESS_SECONDS", 0.02)
    with processes(zygote, tmp_path / "cluster") as cluster:
        cluster.start_worker()
        with cluster.client():
            reports = watched(da.from_array(ROWS, chunks=(len(ROWS) // CHUNKS, 2)).map_blocks(slowly))
    assert len(reports) > 2
    assert min(reports[:-1]) > 0


def test_tasks_that_are_done_stand_for_their_chunks():
    states = {"processing": 2, "waiting": 1, "queued": 1, "memory": 3, "released": 1, "forgotten": 2}
    assert dask_graph.chunks_of_states(states, 100) == 60
    assert dask_graph.chunks_of_states({}, 100) == 0


def test_a_scheduler_that_runs_no_functions_ends_no_fit():
    class Refusing:
        asked = 0

        def run_on_scheduler(self, *arguments):
            self.asked += 1
            raise ValueError("Cannot run function as the scheduler has been explicitly disallowed")

    class Graph:
        layer, chunks_of = "layer", {"a": (0, 1), "b": (2,)}

    client, events = Refusing(), Events()
    events.stage("iteration 1", 3)
    before, dask_graph.PROGRESS_SECONDS = dask_graph.PROGRESS_SECONDS, 0.01
    try:
        with dask_graph.counted(client, Graph(), events):
            time.sleep(0.1)
    finally:
        dask_graph.PROGRESS_SECONDS = before
    assert client.asked == 1
    assert events.reports[0] == [3]


def test_the_log_tells_of_beginning_passes_commits_and_end(caplog, tmp_path):
    caplog.set_level("DEBUG", logger="emtau_dask")
    policy, run = EMTau(tau=2, revisit=3), str(tmp_path / "run")
    model = quietly(mixture(algorithm=policy, tol=0, max_iter=4, checkpoint=run, **START), ROWS)
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    full = {record.iteration for record in model.history_ if record.full_pass}
    assert said[0][0] == "INFO"
    assert said[0][1].startswith("fit begins: 300 rows, 2 features, 3 components (full), EMTau, on ")
    passes = [text for level, text in said if level == "INFO" and text.startswith("iteration ")]
    assert {int(text.split()[1].rstrip(":")) for text in passes} == full
    assert sum(level == "DEBUG" and text.startswith("commit ") for level, text in said) >= 4
    assert [text.partition(":")[0] for _, text in said[-2:]] == ["fit ended (max-iter)", "fit"]
    caplog.clear()
    with pytest.warns(match="did not converge"):
        GaussianMixture.resume(run, ROWS, max_iter=5)
    assert any(text.getMessage().startswith("fit resumed after iteration 4: ") for text in caplog.records)


def test_nothing_is_said_unless_asked(capfd):
    X = np.random.default_rng(0).normal(size=(500, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GaussianMixture(2, tol=1e-3).fit(X)
    assert capfd.readouterr() == ("", "")


def test_the_command_logs_to_standard_error_in_place_of_progress(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", ROWS)
    ended = emtau("--log-level", "info", "fit", "rows.npy", "-k", 2, "--json")
    assert ended.exit_code == 0
    assert json.loads(ended.stdout)
    lines = ended.stderr.splitlines()
    assert any(" INFO fit begins: 300 rows" in line for line in lines)
    assert not any(line.startswith("iteration ") for line in lines)
    assert [type(handler) for handler in logging.getLogger("emtau_dask").handlers] == [logging.NullHandler]


def test_progress_stays_out_of_the_piped_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", ROWS)
    ended = emtau("fit", "rows.npy", "-k", 2, "--json")
    assert json.loads(ended.stdout)
    assert any(
        line.startswith("from the best start: log-likelihood per row -") for line in ended.stderr.splitlines()
    )
