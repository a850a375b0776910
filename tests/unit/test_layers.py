"""Imports go downwards only and by the front door, state is not hidden, and importing changes nothing."""

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import emtau_dask

PACKAGE = Path(emtau_dask.__file__).parent
LAYERS = (
    "messages",
    "errors",
    "checks",
    "settings",
    "versions",
    "process",
    "interrupts",
    "calls",
    "mixture.numerics",
    "mixture.covariance",
    "mixture.model",
    "mixture.estep",
    "mixture.compiled",
    "ascent",
    "policies",
    "io.files",
    "io.remote",
    "io.zarr_format",
    "io.formats",
    "io.sources",
    "io.objects",
    "io.cache",
    "io.output",
    "cluster",
    "execution",
    "rows",
    "em",
    "init",
    "checkpoint",
    "fit",
    "progress",
    "inputs",
    "estimator",
    "selection",
    "outliers",
    "plot",
    "config",
    "report",
    "datasets",
    "runs",
    "compare",
    "cli",
)
"""From the bottom up; a module may import its own layer and those below it."""
MOST_MODULES = 12
"""Of a folder, beside its `__init__`."""
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def dotted(path):
    """`emtau_dask/em/loop.py` -> `em.loop`, and `emtau_dask/em/__init__.py` -> `em`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {dotted(path): path for path in MODULES}


def folder_of(name):
    """The folder of a module; a module beside the folders is one of its own."""
    if NAMES[name].name == "__init__.py":
        return name
    return name.rpartition(".")[0] or name


def imports_of(path):
    """What a module imports of the package, in functions and for type checkers too: (module, line)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} imports relatively"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name.partition(".")[0] == "emtau_dask":
                inner = name.removeprefix("emtau_dask").lstrip(".")
                yield inner if inner in NAMES else inner.rpartition(".")[0], node.lineno


EDGES = {name: {other for other, _ in imports_of(path)} - {name, ""} for name, path in NAMES.items()}


def circle(edges):
    """A circle of imports, or nothing."""
    finished, path = set(), []

    def visit(name):
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return []
        path.append(name)
        found = next((found for other in sorted(edges[name]) if (found := visit(other))), [])
        path.pop()
        finished.add(name)
        return found

    return next((found for name in sorted(edges) if (found := visit(name))), [])


def test_every_module_belongs_to_a_layer():
    parents = {name for name in NAMES if any(other.startswith(f"{name}.") for other in LAYERS)}
    assert {folder_of(name) for name in NAMES} - parents == set(LAYERS)


def test_imports_go_downwards():
    place = {folder: number for number, folder in enumerate(LAYERS)}
    upwards = [
        f"{name} imports {other}"
        for name, others in EDGES.items()
        for other in sorted(others)
        if place[folder_of(other)] > place.get(folder_of(name), 0)
    ]
    assert upwards == []


def test_no_modules_import_each_other():
    """A folder's `__init__` counts with its folder, which imports its modules and is imported by others."""
    within = {
        name: {other for other in others if NAMES[other].name != "__init__.py"}
        for name, others in EDGES.items()
    }
    assert circle(within) == []


def test_no_folders_import_each_other():
    folders = defaultdict(set)
    for name, others in EDGES.items():
        folders[folder_of(name)] |= {folder_of(other) for other in others} - {folder_of(name)}
    assert circle(folders) == []


def test_nothing_reaches_past_the_door_of_another_folder():
    past = [
        f"{NAMES[name]}:{line} imports {other}"
        for name in NAMES
        for other, line in imports_of(NAMES[name])
        if "." in other and folder_of(other) != folder_of(name) and NAMES[other].name != "__init__.py"
    ]
    assert past == []


def test_folders_are_small():
    modules = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    assert {folder: number for folder, number in modules.items() if number > MOST_MODULES} == {}


def test_folders_say_in_one_paragraph_what_lives_there():
    said = {
        folder: ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        for folder in {path.parent for path in MODULES}
    }
    assert {folder: text for folder, text in said.items() if not text or "\n\n" in text} == {}


def test_mixture_knows_numpy_and_scipy_only():
    """And numba, in the modules that compile; the package can do without."""
    allowed = {"numpy", "scipy", "emtau_dask", *sys.stdlib_module_names}
    compiling = {
        "mixture.compiled.first_use": {"numba"},
        "mixture.compiled.loop": {"numba", "llvmlite"},
        "mixture.compiled.products": {"numba"},
        "mixture.compiled.tiling": {"numba"},
        "mixture.compiled.vectors": {"numba", "llvmlite"},
    }
    found = {
        (name, package)
        for name, path in NAMES.items()
        if name.startswith("mixture.")
        for package in packages_of(path) - allowed - compiling.get(name, set())
    }
    assert found == set()


def packages_of(path):
    """The packages that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found


def test_only_io_and_above_know_dask_and_zarr():
    low = LAYERS[LAYERS.index("mixture.numerics") : LAYERS.index("io.files")]
    known = {name for name, path in NAMES.items() if packages_of(path) & {"dask", "zarr", "distributed"}}
    assert {name for name in known if folder_of(name) in low} == set()


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
assert "emtau_dask.estimator.gaussian_mixture" in sys.modules
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
