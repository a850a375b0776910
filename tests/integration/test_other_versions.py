"""A worker whose packages differ is named with both versions, whether it fails or not.

Its zarr is a copy of ours that says that it is of another version and lacks what another version may lack.
What its last bits depend on, NumPy and the kernels of its BLAS, is named too.
"""

import platform
import re
import shutil
from pathlib import Path

import dask
import pytest
import zarr
from clusters import addresses, processes
from fits import ROWS, assert_close, assert_same_bits, mixture, quietly
from reliability.zygote import Zygote
from threadpoolctl import threadpool_info

import emtau_dask
from emtau_dask import ClusterError, EMTau, InvalidDataError
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator import fitting

pytestmark = pytest.mark.cluster
OTHER = "2.99.9"
BOTH = rf"zarr {OTHER}, the process that fits {zarr.__version__}"
LACKS = {
    "a class that is pickled": "import zarr.storage._local\ndel zarr.storage._local.LocalStore\n",
    "a method that reads": "Array.__getitem__ = lambda self, *rows, **how:"
    " self.get_of_another_version(*rows)\n",
}


def fit(X):
    settings = {"algorithm": EMTau(2, 2), "tol": 0, "max_iter": 5, "init_params": "random"}
    return quietly(mixture(**settings), X)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "rows.zarr"
    # By gzip: rows by other codecs, or by none, are read without zarr where they are all of one local chunk.
    return zarr.create_array(store=path, data=ROWS, chunks=(30, 2), compressors=zarr.codecs.GzipCodec())


@pytest.fixture(scope="module")
def expected(stored):
    with dask.config.set(scheduler="threads"):
        return fit(stored)


@pytest.fixture(scope="module", params=list(LACKS))
def lacking(request, tmp_path_factory):
    """What our zarr has and the other one lacks, and a process that has the other one."""
    folder = tmp_path_factory.mktemp("packages")
    package = Path(zarr.__file__).parent
    shutil.copytree(package, folder / package.name)
    with (folder / package.name / "__init__.py").open("a") as file:
        file.write(f"\n__version__ = {OTHER!r}\n{LACKS[request.param]}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder))
        zygote = Zygote("clusters")
    with zygote:
        yield request.param, zygote


@pytest.fixture
def cluster(zygote, tmp_path):
    with processes(zygote, tmp_path / "cluster", scheduler__allowed_failures="9") as cluster:
        yield cluster


def start_other(cluster, zygote):
    """Start a worker from another zygote, and return its name."""
    own, cluster.zygote = cluster.zygote, zygote
    try:
        return cluster.start_worker()
    finally:
        cluster.zygote = own


def refusal(lacks):
    """What ends a fit: the kind of error, and what it says after the worker's name."""
    if lacks == "a class that is pickled":
        return ClusterError, r"cannot unpickle .*AttributeError: .*LocalStore.* \(" + BOTH
    return InvalidDataError, r"cannot see X: AttributeError: .*get_of_another_version.* \(" + BOTH


def test_one_that_can_do_it_is_warned_of(cluster, stored, expected):
    name = cluster.start_worker(before=(("pretend", f"zarr {OTHER}"),))
    with cluster.client() as client:
        address = addresses(client)[name]
        with pytest.warns(UserWarning, match="packages that read data"):
            found = fit(stored)
    (note,) = found.history_.notes
    assert f"{address} (zarr {OTHER}, here {zarr.__version__})" in note
    assert_same_bits(found, expected)


LAST_BITS = "what the last digits of a result depend on: "


KERNELS = {"x86_64": ("Haswell", "Nehalem"), "aarch64": ("ARMV8", "NEOVERSEN1")}
"""Of OpenBLAS, by machine: any of them runs on all that it is tested on."""


def test_one_whose_blas_has_other_kernels_is_warned_of(cluster, stored, expected):
    mine = {library.get("architecture") for library in threadpool_info()}
    other = next(kind for kind in KERNELS[platform.machine()] if kind not in mine)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("OPENBLAS_CORETYPE", other)
        zygote = Zygote("clusters")
    with zygote:
        name = start_other(cluster, zygote)
        cluster.start_worker()
        with cluster.client() as client:
            address = addresses(client)[name]
            with pytest.warns(UserWarning, match=LAST_BITS):
                found = fit(stored)
    (note,) = found.history_.notes
    assert re.search(rf"{LAST_BITS}{address} \(cpu {platform.machine()} .*{other}.*, here ", note), note
    assert_close(found, expected)


def test_another_version_of_this_package_is_refused(cluster, stored):
    name = cluster.start_worker(before=(("pretend", "emtau_dask 0.0.7"),))
    with cluster.client() as client:
        address = addresses(client)[name]
        says = f"the worker {address} has emtau_dask 0.0.7, the process that fits {emtau_dask.__version__}"
        with pytest.raises(ClusterError, match=says):
            fit(stored)


def test_one_that_cannot_is_named_before_anything_runs(cluster, lacking, stored):
    lacks, zygote = lacking
    name = start_other(cluster, zygote)
    error, says = refusal(lacks)
    with cluster.client() as client:
        address = addresses(client)[name]
        with pytest.raises(error, match=f"the worker {address} {says}"):
            fit(stored)


def test_one_that_cannot_and_joins_late_is_named(cluster, lacking, stored, monkeypatch):
    lacks, zygote = lacking
    late = {}

    class Observer(SilentObserver):
        def iteration(self, record, parameters):
            if record.iteration == 2:
                name = start_other(cluster, zygote)
                cluster.wait(client)
                late["address"] = addresses(client)[name]
                cluster.kill_worker(first)
                cluster.wait(client)

    monkeypatch.setattr(fitting, "observer_for", lambda verbose: Observer())
    first = cluster.start_worker()
    error, says = refusal(lacks)
    with cluster.client() as client, pytest.raises(error, match=says) as refused:
        fit(stored)
    assert f"the worker {late['address']} " in str(refused.value)
