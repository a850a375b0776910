"""All processes of a fit read the same data and row state, wherever they work and whenever they join."""

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import zarr
from clusters import addresses, processes
from fits import ROWS, assert_same_bits, mixture, quietly
from zarr.storage import ZipStore

from emtau_dask import CheckpointError, EMTau, GaussianMixture, InvalidDataError, StorageError
from emtau_dask.cli.main import main
from emtau_dask.data.opening import open_source
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting

pytestmark = pytest.mark.cluster
WEIGHTS = np.linspace(0.5, 1.5, len(ROWS))
KINDS = ("rows.zarr", "rows.npy", "rows.parquet")


def fit(X, algorithm="em", checkpoint=None, **options):
    settings = {"tol": 0, "max_iter": 5, "init_params": "random", "checkpoint": checkpoint}
    return quietly(mixture(algorithm=algorithm, **settings), X, **options)


def write(folder, shift):
    """Store rows, and weights, in every format; those of another shift have equal metadata."""
    folder.mkdir()
    rows, weights = ROWS + shift, WEIGHTS + shift
    zarr.create_array(store=folder / "rows.zarr", data=rows, chunks=(50, 2), compressors=None)
    zarr.create_array(store=folder / "weights.zarr", data=weights, chunks=(50,), compressors=None)
    with ZipStore(folder / "rows.zip", mode="w") as store:
        zarr.create_array(store=store, data=rows, chunks=(50, 2))
    np.save(folder / "rows.npy", rows)
    table = pd.DataFrame(rows, columns=["a", "b"])
    table.to_parquet(folder / "rows.parquet", row_group_size=50, compression=None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders of data that differ in values alone."""
    place = tmp_path_factory.mktemp("data")
    write(place / "here", 0)
    write(place / "there", 1000)
    return place / "here", place / "there"


@pytest.fixture(scope="module")
def expected(folders):
    with dask.config.set(scheduler="threads"):
        return {name: fit(str(folders[0] / name)) for name in KINDS}


@pytest.fixture(scope="module")
def cluster(zygote, folders, tmp_path_factory):
    """A worker that works in the second folder."""
    with processes(zygote, tmp_path_factory.mktemp("shared") / "cluster") as cluster:
        cluster.start_worker(before=(("enter", str(folders[1])),))
        yield cluster


@pytest.fixture
def client(cluster, folders, monkeypatch):
    """A client that works in the first folder."""
    monkeypatch.chdir(folders[0])
    with cluster.client() as client:
        yield client


OPENED = {
    "a path": lambda: "rows.zarr",
    "a source": lambda: open_source("rows.zarr"),
    "a zarr array": lambda: zarr.open_array("rows.zarr", mode="r"),
    "a zarr array in a zip file": lambda: zarr.open_array(ZipStore("rows.zip", mode="r"), mode="r"),
    "a dask array": lambda: da.from_zarr("rows.zarr"),
    "a dask array of a zarr array": lambda: da.from_zarr(zarr.open_array("rows.zarr", mode="r")),
    "the same, inline": lambda: da.from_zarr(zarr.open_array("rows.zarr", mode="r"), inline_array=True),
    "a .npy file": lambda: "rows.npy",
    "a parquet file": lambda: "rows.parquet",
}


@pytest.mark.parametrize("how", OPENED)
def test_a_relative_path_means_the_fitting_processs_folder_on_workers_too(client, expected, how):
    kind = {"a .npy file": "rows.npy", "a parquet file": "rows.parquet"}.get(how, "rows.zarr")
    assert_same_bits(fit(OPENED[how]()), expected[kind])


def test_so_do_those_of_weights_and_of_data_to_be_scored(client, folders):
    with dask.config.set(scheduler="threads"):
        model = fit(ROWS, sample_weight=WEIGHTS)
    found = fit("rows.zarr", sample_weight=zarr.open_array("weights.zarr", mode="r"))
    assert np.allclose(found.means_, model.means_, rtol=1e-10)
    for X in (zarr.open_array("rows.zarr", mode="r"), da.from_zarr("rows.zarr")):
        assert np.array_equal(found.predict(X).compute(), found.predict(ROWS))
    assert found.score("rows.zarr") == pytest.approx(found.score(ROWS), rel=1e-12)


def test_the_command_line_fits_and_labels_one_array(cluster, folders, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(folders[0])
    config = tmp_path / "run.yaml"
    config.write_text(
        "data: {path: rows.zarr}\n"
        "model: {n_components: 3, init_params: random, random_state: 0}\n"
        "algorithm: {name: em}\n"
        "stop: {tol: 0, max_iter: 5}\n"
        f"output: {{directory: {tmp_path / 'out'}}}\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["fit", str(config), "--scheduler", cluster.address])
    assert ended.value.code == 3
    model = GaussianMixture.load(tmp_path / "out" / "model.zarr")
    assert np.array_equal(model.means_, expected["rows.zarr"].means_)


def test_other_values_beneath_a_users_own_tasks_are_refused(cluster, client):
    (address,) = addresses(client).values()
    X = da.from_array(zarr.open_array("rows.zarr", mode="r")) * 1.0
    with pytest.raises(InvalidDataError, match=f"the worker {address} sees other data as .*X is made from"):
        fit(X)


@pytest.fixture(scope="module")
def swapped(zygote, folders, tmp_path_factory):
    """A worker that finds the second folder in the place of the first."""
    with processes(zygote, tmp_path_factory.mktemp("swapped") / "cluster") as cluster:
        cluster.start_worker(before=(("swap", "\n".join(map(str, folders))),))
        yield cluster


class TestAnotherMachine:
    """Workers that see, under the same absolute path, other values with equal metadata."""

    @pytest.fixture
    def elsewhere(self, swapped):
        with swapped.client() as client:
            yield addresses(client)

    @pytest.mark.sample
    @pytest.mark.parametrize("name", KINDS)
    def test_rows(self, elsewhere, folders, name):
        (address,) = elsewhere.values()
        with pytest.raises(InvalidDataError, match=f"worker {address} sees other data as X .*the digest"):
            fit(str(folders[0] / name))

    def test_weights(self, elsewhere, folders):
        (address,) = elsewhere.values()
        weights = zarr.open_array(folders[0] / "weights.zarr", mode="r")
        with pytest.raises(InvalidDataError, match=f"{address} sees other data as sample_weight"):
            fit(ROWS, sample_weight=weights)

    def test_rows_to_be_scored(self, elsewhere, folders, expected):
        (address,) = elsewhere.values()
        labels = expected["rows.npy"].predict(str(folders[0] / "rows.npy"))
        with pytest.raises(InvalidDataError, match=f"{address} sees other data"):
            labels.compute()


def test_csv_in_scratch_that_a_worker_does_not_see(zygote, tmp_path):
    pd.DataFrame(ROWS).to_csv(tmp_path / "rows.csv", index=False)
    (tmp_path / "scratch").mkdir()
    with processes(zygote, tmp_path / "cluster") as cluster:
        cluster.start_worker(before=(("hide", str(tmp_path / "scratch")),))
        with (
            cluster.client(),
            dask.config.set({"emtau.scratch": str(tmp_path / "scratch")}),
            pytest.raises(InvalidDataError, match=r"worker .* cannot see X: .*rows\.csv .*emtau\.scratch"),
        ):
            fit(str(tmp_path / "rows.csv"))
    assert not list((tmp_path / "scratch").iterdir())


class TestAWorkerThatJoinsLate:
    @pytest.fixture
    def joined(self, zygote, tmp_path, monkeypatch):
        """Return a cluster whose only worker, after the second iteration, gives way to another one."""
        how = {}

        class Observer(SilentObserver):
            def iteration(self, record, parameters):
                if record.iteration == 2:
                    (first,) = cluster.workers
                    late = cluster.start_worker(**how)
                    cluster.wait(client)
                    how["address"] = addresses(client)[late]
                    cluster.kill_worker(first)
                    cluster.wait(client)

        monkeypatch.setattr(fitting, "observer_for", lambda verbose: Observer())
        with (
            processes(zygote, tmp_path / "cluster", 1, scheduler__allowed_failures="9") as cluster,
            cluster.client() as client,
        ):
            yield how

    @pytest.mark.parametrize("name", KINDS)
    def test_and_sees_other_rows_ends_the_fit(self, joined, folders, name):
        here, there = folders
        joined["before"] = (("swap", f"{here}\n{there}"),)
        with pytest.raises(InvalidDataError, match=r"sees other data as X .*the digest") as refused:
            fit(str(here / name))
        assert f"the worker {joined['address']} " in str(refused.value)

    def test_and_sees_other_weights_ends_the_fit(self, joined, folders):
        here, there = folders
        joined["before"] = (("swap", f"{here}\n{there}"),)
        weights = zarr.open_array(here / "weights.zarr", mode="r")
        with pytest.raises(InvalidDataError, match=r"sees other data as sample_weight") as refused:
            fit(ROWS, sample_weight=weights)
        assert f"the worker {joined['address']} " in str(refused.value)

    @pytest.mark.parametrize("kept", [False, True], ids=["temporary", "checkpoint"])
    def test_and_does_not_see_row_state_ends_the_fit(self, joined, folders, tmp_path, kept):
        place = tmp_path / "state"
        place.mkdir()
        joined["before"] = (("hide", str(place)),)
        checkpoint, kind = (place / "run.zarr", CheckpointError) if kept else (None, StorageError)
        with (
            dask.config.set({"temporary-directory": str(place)}),
            pytest.raises(kind, match="where row state goes: it does not find") as refused,
        ):
            fit(str(folders[0] / "rows.zarr"), EMTau(2, 2), checkpoint=checkpoint)
        assert f"the worker {joined['address']} " in str(refused.value)

    def test_with_other_versions_is_named_and_noted(self, joined, folders, expected):
        joined["before"] = (("pretend", "numpy 1.99.0"),)
        with pytest.warns(UserWarning, match="workers differ"):
            found = fit(str(folders[0] / "rows.zarr"))
        (note,) = found.history_.notes
        assert f"{joined['address']} (numpy 1.99.0, here {np.__version__})" in note
        assert_same_bits(found, expected["rows.zarr"])
