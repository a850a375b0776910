"""Imports go downwards and name the file that defines, state is not hidden, and importing changes nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import emtau_dask

PACKAGE = Path(emtau_dask.__file__).parent
FLOORS = (
    {"constraints", "errors", "interrupts", "process", "settings"},
    {"dask_config", "mixture", "policies"},
    {"kernels", "storage"},
    {"data"},
    {"execution"},
    {"em"},
    {"checkpoint", "progress", "sources"},
    {"datasets", "estimator"},
    {"compare", "plot", "selection"},
    {"report"},
    {"cli"},
)
"""From the ground up; a folder, or a module beside the folders, may import what stands on lower floors."""
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
OF_THE_GROUND = {"errors": 0, "constraints": 1, "interrupts": 1, "process": 2, "settings": 2}
"""The ground floor has an order of its own."""
PUBLIC = {"em", "estimator", "plot", "policies", "selection"}
"""Folders that hand on the names that users import from them."""
NUMERICS = {"mixture", "policies", "kernels"}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
FOLDERS = sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def dotted(path):
    """`emtau_dask/em/loop.py` -> `em.loop`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


NAMES = {dotted(path): path for path in MODULES}


def folder_of(name):
    """The folder of a module; a module beside the folders is one of its own."""
    return name.partition(".")[0]


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


IMPORTS = {name: sorted(set(imports_of(path))) for name, path in NAMES.items()}


def may_import(name, other):
    """Whether a module may import another one."""
    here, there = folder_of(name), folder_of(other)
    if here == there:
        return name != here
    if {here, there} <= set(OF_THE_GROUND):
        return OF_THE_GROUND[there] < OF_THE_GROUND[here]
    return FLOOR[there] < FLOOR[here]


def test_every_module_stands_on_a_floor():
    assert {folder_of(name) for name in NAMES} == set(FLOOR)


def test_imports_go_downwards():
    upwards = [
        f"{NAMES[name]}:{line} imports {other}"
        for name, found in IMPORTS.items()
        for other, line in found
        if other and not may_import(name, other)
    ]
    assert upwards == []


def test_imports_name_the_file_that_defines():
    """Not a folder; of the package itself only its version."""
    folders = [
        f"{NAMES[name]}:{line} imports from {other or 'the package'}"
        for name, found in IMPORTS.items()
        for other, line in found
        if other not in NAMES
        and not (other == "" and "__version__" in NAMES[name].read_text(encoding="utf-8"))
    ]
    assert folders == []


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


def test_no_modules_import_each_other():
    assert circle({name: {other for other, _ in found if other} for name, found in IMPORTS.items()}) == []


def test_a_folder_says_what_lives_there_and_hands_on_what_users_import():
    wrong = []
    for folder in FOLDERS:
        tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
        said = ast.get_docstring(tree)
        if not said or "\n" in said or (len(tree.body) > 1 and folder.name not in PUBLIC):
            wrong.append(str(folder))
    assert wrong == []
    assert [path for path in PACKAGE.rglob("*.py") if len(path.relative_to(PACKAGE).parts) > 2] == []


def test_numerics_know_numpy_and_scipy_only():
    """And the kernels numba, which the package can do without; policies are estimators of scikit-learn."""
    allowed = {"numpy", "scipy", "emtau_dask", *sys.stdlib_module_names}
    more = {"kernels": {"numba", "llvmlite"}, "policies": {"sklearn"}}
    found = {
        (name, package)
        for name, path in NAMES.items()
        if folder_of(name) in NUMERICS
        for package in packages_of(path) - allowed - more.get(folder_of(name), set())
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
