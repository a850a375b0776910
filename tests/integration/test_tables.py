"""Tables that go into files and pipes: plain characters, at most 80 columns, no rounding noise."""

import re

import numpy as np
import pytest
import zarr
from commands import emtau

from emtau_dask import GaussianMixture

BOX_DRAWING = re.compile("[\u2500-\u257f]")


def model_of(rows, **settings):
    start = {"means_init": [[0.0] * rows.shape[1]], "tol": 1e-3, "algorithm": "em"}
    return GaussianMixture(1, **(start | settings)).fit(rows)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run of 12 components and 40 features of very different sizes."""
    folder = tmp_path_factory.mktemp("tables")
    rows = np.random.default_rng(0).normal(size=(400, 40)) * np.logspace(-3, 6, 40)
    labels = np.arange(400) % 16
    group = zarr.create_group(folder / "data.zarr")
    group.create_array("X", data=rows)
    group.create_array("labels", data=labels)
    (folder / "run.yaml").write_text(
        f"data: {{path: {folder}/data.zarr, labels: labels}}\n"
        "model: {n_components: 12, covariance_type: diag, reg_covar: 1e-7}\n"
        "algorithm: {name: em, compare: [{name: em}, {name: em-tau, tau: 3}, {name: kmeans}]}\n"
        "stop: {tol: 1e-2, max_iter: 4}\n"
        f"checkpoint: {{path: {folder}/run.zarr}}\noutput: {{directory: {folder}/out}}\n"
    )
    assert emtau("fit", folder / "run.yaml", "--overwrite").exit_code in (0, 3)
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "run.yaml", "--overwrite"],
        ["fit", "run.yaml", "--plan"],
        ["inspect", "run.zarr"],
        ["inspect", "out/model.zarr"],
        ["compare", "run.yaml"],
    ],
    ids=" ".join,
)
def test_piped_tables_are_plain_and_narrow(place, monkeypatch, arguments):
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "200")
    result = emtau(*arguments)
    assert result.exit_code in (0, 3), result.output
    with_places = re.compile(r" saved in |^next: ")  # such lines are not cut
    tables = [line for line in result.stdout.splitlines() if not with_places.search(line)]
    assert len(tables) > 5
    assert [line for line in tables if BOX_DRAWING.search(line)] == []
    assert [line for line in tables if len(line) > 80] == []
    assert "…" not in result.stdout


@pytest.mark.parametrize("offset", [0.0, 1e6, 1.7e9, 1e15])
@pytest.mark.parametrize("deviation", [0.02, 1.0, 300.0])
def test_means_are_told_apart_far_from_0(offset, deviation):
    model = model_of(np.random.default_rng(0).normal(size=(100, 1)))
    means = offset + deviation * np.array([0.0, 2.0])
    model.weights_ = np.array([0.5, 0.5])
    model.means_ = means[:, np.newaxis]
    model.covariances_ = np.full((2, 1, 1), deviation**2)
    model.precisions_cholesky_ = np.full((2, 1, 1), 1 / deviation)
    found = [float(each) for each in re.findall(r"(\S+) ±", str(model.summary()))]
    np.testing.assert_allclose(found, means, rtol=1e-14, atol=deviation / 10)


class TestNumbersThatAreRoundingNoise:
    @pytest.mark.parametrize("features", [2, 6])
    def test_are_0(self, features):
        rows = np.random.default_rng(0).normal(size=(100, features))
        rows = np.concatenate([rows, -rows]) + 2.35e-17
        model = model_of(rows)
        model.means_[0] = -2.35e-17
        found = str(model.summary())
        assert "e-17" not in found
        assert "-0" not in found.replace("-0.", "")
        assert "0.00 ±" in found

    def test_beside_other_components_are_0(self):
        model = model_of(np.random.default_rng(0).normal(size=(100, 2)))
        model.means_ = np.array([[5.0, 1e-30], [-3e-16, 2e-30]])
        model.covariances_ = np.array([np.diag([1e-40, 1e-60])] * 2)
        model.precisions_cholesky_ = np.array([np.diag([1e20, 1e30])] * 2)
        model.weights_ = np.array([0.5, 0.5])
        found = str(model.summary())
        assert "e-16" not in found
        assert "1e-30" in found
        assert "2e-30" in found

    def test_small_numbers_of_small_data_stay(self):
        rows = np.random.default_rng(0).normal(3e-17, 1e-17, size=(100, 2))
        found = str(model_of(rows, reg_covar=0.0).summary())
        assert "e-17" in found
