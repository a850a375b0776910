"""Imports go downwards only, and importing the package changes nothing in the process."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import emtau_dask

PACKAGE = Path(emtau_dask.__file__).parent
LAYERS = ("shown", "errors", "mixture", "activity", "storage", "engine", "face")
"""From the bottom up; a module may import its own layer and those below it."""

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _parts(path):
    """`emtau_dask/engine/loop.py` -> ('emtau_dask', 'engine', 'loop')."""
    return ("emtau_dask", *path.relative_to(PACKAGE).with_suffix("").parts)


def _imports(path):
    """Dotted names of everything of the package that a module imports, in functions too."""
    module = _parts(path)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module[: len(module) - node.level] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def _layer(dotted):
    """The layer of a dotted name; None where it is outside the package."""
    first, *rest = dotted.split(".")
    if first != "emtau_dask":
        return None
    assert rest, "a module imports the whole package, that is, its topmost layer"
    return rest[0]


def test_every_module_belongs_to_a_layer():
    assert {_parts(path)[1] for path in MODULES} == set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: ".".join(_parts(path)[1:]))
def test_imports_go_downwards(path):
    own = LAYERS.index(_parts(path)[1])
    wrong = [name for name in _imports(path) if _layer(name) and LAYERS.index(_layer(name)) > own]
    assert wrong == []


def test_mixture_knows_numpy_and_scipy_only():
    """And numba, in the modules that compile; the package can do without."""
    allowed = {"numpy", "scipy", "emtau_dask", *sys.stdlib_module_names}
    compiling = {
        "compiled": {"numba", "llvmlite"},
        "compiled_products": {"numba", "llvmlite"},
        "tiles": {"numba"},
    }
    found = {
        name.partition(".")[0]
        for path in MODULES
        if _parts(path)[1] == "mixture"
        for name in _imports(path)
        if name.partition(".")[0] not in compiling.get(path.stem, set())
    }
    assert found <= allowed


def test_only_storage_and_above_know_dask_and_zarr():
    low = [path for path in MODULES if LAYERS.index(_parts(path)[1]) < LAYERS.index("storage")]
    assert [
        p for p in low if {n.partition(".")[0] for n in _imports(p)} & {"dask", "zarr", "distributed"}
    ] == []


PROBE = """
import copy, importlib, json, os, pkgutil, sys, threading, warnings
import click, dask.array, distributed, numpy, pyarrow.parquet, pydantic
import rich, scipy, sklearn.mixture, yaml, zarr
from threadpoolctl import threadpool_info  # what the dependencies do is theirs

def seen():
    return {
        "environment": dict(os.environ),
        "dask": copy.deepcopy(dask.config.config),
        "zarr": copy.deepcopy(zarr.config.config),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "warnings": [str(f) for f in warnings.filters],
        "numpy": [numpy.geterr(), numpy.get_printoptions()],
        "blas": sorted((pool["filepath"], pool["num_threads"]) for pool in threadpool_info()),
    }

before = seen()
import emtau_dask
for module in pkgutil.walk_packages(emtau_dask.__path__, "emtau_dask."):
    importlib.import_module(module.name)
after = seen()
assert "emtau_dask.face.estimator" in sys.modules
print(json.dumps([name for name in before if before[name] != after[name]]))
"""


def test_importing_every_module_changes_nothing():
    run = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]", run.stdout


LOCAL = """
import sys
import dask, numpy
from emtau_dask import GaussianMixture

rows = numpy.random.default_rng(0).normal(size=(60, 2))
for scheduler in (None, "threads", "Synchronous"):
    with dask.config.set(scheduler=scheduler):
        GaussianMixture(2, tol=1.0, random_state=0).fit(rows)
assert "distributed" not in sys.modules
from distributed import Client
with Client(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None) as client:
    GaussianMixture(2, tol=1.0, random_state=0).fit(rows)
    print(client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.transition_counter > 0))
"""


def test_fits_in_this_process_do_not_import_distributed_but_heed_a_client_that_comes_later():
    run = subprocess.run([sys.executable, "-c", LOCAL], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "True"
