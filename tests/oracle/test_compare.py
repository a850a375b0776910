"""`emtau compare` against the naive oracle: held responsibilities, errors and confusion tables."""

import io

import numpy as np
import pytest
import yaml
import zarr
from counting import plans_counted
from oracles import naive, policies, starts
from rich.console import Console

from emtau_dask.cli.compare import comparison_of, print_comparison
from emtau_dask.cli.config import load_config
from emtau_dask.compare import classification_error, confusion
from emtau_dask.em.history import SilentObserver
from emtau_dask.errors import ConfigError

N, K, SEED, CHUNK = 240, 3, 5, 70
LISTED = [
    {"name": "em"},
    {"name": "em-tau", "tau": 3, "revisit": None},
    {"name": "em-tau", "tau": 3, "revisit": "on-empty"},
    {"name": "em-star", "tail": 0.75},
    {"name": "em-lazy", "threshold": 0.9, "full_every": 4},
]
ORACLES = [
    policies.FullEM(),
    policies.EMTau(3, None),
    policies.EMTau(3, "on-empty"),
    policies.EMStar(tail=0.75),
    policies.EMLazy(0.9, 4),
]
NAMES = ["em", "em-tau(3, None)", "em-tau(3, on-empty)", "em-star(0.75, 1)", "em-lazy(0.9, 4)"]


@pytest.fixture(scope="module")
def data():
    X = starts.mixture(N, K, 2, separation=2.0, seed=3)
    X = X[0] if isinstance(X, tuple) else X
    return np.asarray(X), np.random.default_rng(1).integers(0, 4, N) * 2 + 1


@pytest.fixture(scope="module")
def compared(data, tmp_path_factory):
    """The comparison, and the parameters for which it planned a kernel."""
    folder = tmp_path_factory.mktemp("compare")
    group = zarr.create_group(folder / "data.zarr")
    group.create_array("X", data=data[0], chunks=(CHUNK, 2))
    group.create_array("labels", data=data[1], chunks=(100,))
    config = {
        "data": {"path": str(folder / "data.zarr"), "labels": "labels"},
        "model": {"n_components": K, "reg_covar": 0.0, "init": {"dirichlet_seed": SEED}},
        "algorithm": {"name": "em", "compare": [*LISTED, {"name": "kmeans"}]},
        "stop": {"tol": 1e-4, "max_iter": 60},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with plans_counted() as planned:
        return comparison_of(load_config(folder / "config.yaml"), SilentObserver()), planned


@pytest.fixture(scope="module")
def comparison(compared):
    return compared[0]


@pytest.fixture(scope="module")
def runs(data):
    start = np.random.default_rng(SEED).dirichlet(np.ones(K), N)
    chunks = [70, 70, 70, 30]
    return [
        naive.fit(data[0], start, policy, max_iter=60, tol=1e-4, reg_covar=0.0, chunks=chunks)
        for policy in ORACLES
    ]


@pytest.fixture(params=range(len(LISTED)), ids=NAMES)
def pair(request, comparison, runs):
    return comparison.lines[request.param], runs[request.param]


def tabulated(components, labels):
    classes = np.unique(labels)
    return [[int(np.sum((components == k) & (labels == c))) for c in classes] for k in range(K)]


def test_each_algorithm_is_the_oracles_run(pair, runs, data):
    """Its work, the responsibilities that it holds, and what its last parameters say of all rows."""
    (line, run), (X, labels) = pair, data
    assert (line.fit.iterations, line.fit.stop_reason) == (len(run.bounds), run.stop_reason)
    assert line.fit.work == pytest.approx(sum(run.counts) / N)
    found, theta = line.evaluation, run.thetas[-1]
    distance = np.sum((run.responsibilities - runs[0].responsibilities) ** 2)
    assert found.squared_distance == pytest.approx(distance, rel=1e-6, abs=1e-12)
    assert found.held.tolist() == tabulated(run.responsibilities.argmax(axis=1), labels)
    assert found.final.tolist() == tabulated(naive.e_step(X, theta).argmax(axis=1), labels)
    assert found.log_likelihood == pytest.approx(naive.log_likelihoods(X, theta).sum(), rel=1e-9)


def test_kmeans_labels_every_row_once(comparison, data):
    line = comparison.lines[-1]
    assert line.evaluation.held.sum() == N
    assert line.evaluation.held.sum(axis=0).tolist() == np.unique(data[1], return_counts=True)[1].tolist()
    assert np.array_equal(line.evaluation.held, line.evaluation.final)


def test_a_kernel_is_planned_once_for_each_parameters_that_rows_are_scored_under(compared):
    """For the fit, and for evaluating it in all chunks; the last parameters only for evaluating."""
    comparison, planned = compared
    assert len(planned) == sum(2 * line.fit.iterations + 1 for line in comparison.lines[:-1])


def test_tables_of_components_by_class():
    """Rows off their component's class are errors; components of one class are added up."""
    assert classification_error(np.array([[5, 1, 0], [2, 0, 3], [0, 0, 9]])) == pytest.approx(3 / 20)
    table = np.array([[5, 1, 0], [4, 3, 0], [0, 0, 9]])
    assert confusion(table).tolist() == [[9, 4, 0], [0, 0, 0], [0, 0, 9]]


def test_every_algorithm_is_named_and_printed(comparison):
    assert [line.fit.name for line in comparison.lines] == [*NAMES, "kmeans"]
    printed = io.StringIO()
    print_comparison(comparison, [None] * len(comparison.lines), Console(file=printed, width=160))
    assert all(name in printed.getvalue() for name in NAMES)


def test_rows_that_stand_for_others_hold_no_responsibilities_to_compare(tmp_path):
    config = {
        "data": {"dataset": "digits", "path": str(tmp_path / "digits.zarr")},
        "model": {"n_components": 2},
        "algorithm": {"name": "em", "compare": [{"name": "em-sampled"}]},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match=r"'em-sampled'.* no responsibilities to compare"):
        comparison_of(load_config(tmp_path / "config.yaml"), SilentObserver())
    assert not (tmp_path / "digits.zarr").exists()
