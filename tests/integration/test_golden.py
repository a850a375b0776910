"""What released versions wrote is read, resumed, or refused by name (`tests/golden/write.py`)."""

import json
import runpy
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from oracles import naive, policies
from oracles.agree import assert_parameters
from sklearn.mixture import GaussianMixture as InMemory

from emtau_dask import GaussianMixture, open_run, select_components

GOLDEN = Path(__file__).parents[1] / "golden"
WRITER = runpy.run_path(str(GOLDEN / "write.py"))
ORACLES = {
    "em": policies.FullEM,
    "em-tau": partial(policies.EMTau, tau=3),
    "em-star": partial(policies.EMStar, every=2),
}
ARCHIVES = sorted(GOLDEN.glob("*.zip"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.stem)
def golden(request, tmp_path):
    """The folder of a released version, and its rows."""
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    assert json.loads((tmp_path / "version.json").read_text()) == request.param.stem
    return tmp_path, np.load(tmp_path / "rows.npy")


def test_there_is_a_golden_file_of_the_first_release():
    assert "1.0.0" in [path.stem for path in ARCHIVES]


@pytest.mark.parametrize("covariance_type", WRITER["COVARIANCE_TYPES"])
def test_a_model_gives_the_densities_that_scikit_learn_gives(golden, covariance_type):
    folder, X = golden
    model = GaussianMixture.load(str(folder / f"model-{covariance_type}.zarr"))
    _, means = WRITER["rows"]()
    expected = InMemory(
        3, covariance_type=covariance_type, tol=1e-10, max_iter=500, means_init=means, random_state=0
    )
    expected.fit(X)
    order = [int(np.argmin(np.abs(expected.means_ - mean).sum(axis=1))) for mean in model.means_]
    np.testing.assert_allclose(model.means_, expected.means_[order], atol=1e-3)
    np.testing.assert_allclose(model.score_samples(X), expected.score_samples(X), atol=1e-3)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # 12 iterations, by design
@pytest.mark.parametrize("name", ORACLES)
def test_a_run_is_resumed_to_where_the_naive_loop_is_after_as_many_iterations(golden, name):
    folder, X = golden
    path = str(folder / f"run-{name}.zarr")
    assert len(open_run(path).history) == 3
    resumed = GaussianMixture.resume(path, X, max_iter=12)
    _, means = WRITER["rows"]()
    run = naive.fit(X, WRITER["start"](means), ORACLES[name](), max_iter=12, tol=0)
    assert resumed.n_iter_ == len(run.bounds)
    assert_parameters(resumed, run)


def test_a_finished_run_of_the_defaults_is_resumed_to_an_optimum(golden):
    folder, X = golden
    resumed = GaussianMixture.resume(str(folder / "run-default.zarr"), X, max_iter=200)
    expected = InMemory(3, tol=1e-10, max_iter=500, means_init=resumed.means_).fit(X)
    assert resumed.score(X) == pytest.approx(expected.score(X), abs=1e-3)


def test_a_selection_is_read_and_not_fitted_again(golden):
    folder, X = golden
    path = folder / "selection.zarr"
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}
    settings = GaussianMixture(algorithm="em", tol=1e-8, max_iter=500)
    selection = select_components(X, range(2, 5), random_state=0, estimator=settings, checkpoint=str(path))
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()} == before
    best = selection.best_estimator_
    expected = InMemory(3, tol=1e-10, max_iter=500, means_init=best.means_).fit(X)
    assert best.n_components == 3
    assert best.score(X) == pytest.approx(expected.score(X), abs=1e-3)
    assert [record.n_components for record in selection.table_] == [2, 3, 4]
