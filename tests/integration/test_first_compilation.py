"""The loops are compiled once, beside what a fit does before it needs them."""

import json
import os
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager

import dask
import numpy as np
import pytest
from fits import ROWS, START, mixture
from sklearn.exceptions import ConvergenceWarning

from emtau_dask.em import compiling
from emtau_dask.em.compiling import COMPILES
from emtau_dask.em.history import SilentObserver
from emtau_dask.estimator.fitting import fit_estimator

IN_ITS_OWN_PROCESS = """
import json, sys, warnings
import dask, numpy as np
from emtau_dask import GaussianMixture
from emtau_dask.kernels import centred, features, missing as incomplete, near
from emtau_dask.kernels.dispatch import compilation_noted, compile_loops
from emtau_dask.mixture.covariance_types import structure_named
warnings.simplefilter("ignore")
forms = features.loops, features.pooled_loops, centred.loops, near.loops, incomplete.loops

def kinds_compiled():
    return [len(form.accumulate.signatures) for form in forms]

found = []
for covariance_type, k, width, dtype, missing in json.loads(sys.argv[1]):
    begun = []
    rows = 200 * k
    with compilation_noted(lambda: begun.append(1)):
        compile_loops(structure_named(covariance_type), k, width, np.dtype(dtype), missing=missing)
    kinds = kinds_compiled()
    rng = np.random.default_rng(0)
    X = (5 * rng.normal(size=(k, width))[np.arange(rows) % k] + rng.normal(size=(rows, width))).astype(dtype)
    how = {"max_iter": 2, "random_state": 0, "missing": "marginalise" if missing else "raise"}
    with dask.config.set({"emtau.compiled": "always", "scheduler": "synchronous"}):
        GaussianMixture(k, covariance_type=covariance_type, algorithm="em", **how).fit(X)
    found.append([len(begun), kinds, kinds_compiled()])
print(json.dumps(found))
"""


def printed(code, cache, *arguments):
    """What a program prints in a process of its own."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    return json.loads(ended.stdout)


def in_a_process(shapes, cache):
    """For each shape: whether something was compiled, and kinds of each form before and after a fit."""
    return printed(IN_ITS_OWN_PROCESS, cache, json.dumps(shapes))


@pytest.mark.exhaustive
def test_a_later_process_finds_what_was_compiled(tmp_path):
    shapes = [("full", 2, 3, "f8", False)]
    assert in_a_process(shapes, tmp_path) == [[1, [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]]
    assert in_a_process(shapes, tmp_path) == [[0, [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]]


@pytest.mark.exhaustive
def test_what_is_compiled_ahead_is_what_a_fit_uses():
    cache = os.environ.get("NUMBA_CACHE_DIR", "")
    shapes = [
        ("full", 2, 3, "f8", False),
        ("full", 2, 3, "f4", False),
        ("full", 2, 20, "f8", False),
        ("tied", 2, 3, "f8", False),
        ("full", 2, 3, "f8", True),
    ]
    for _, before, after in in_a_process(shapes, cache):
        assert any(before)
        assert before == after


class Notes(SilentObserver):
    def __init__(self):
        self.notes = []

    def note(self, message):
        self.notes.append(message)


@pytest.fixture
def compiled_for(monkeypatch):
    """What fits ask to be compiled; told as if nothing had been before."""
    asked = []

    def noted(structure, n_components, n_features, dtype, missing):
        asked.append((structure.name, n_components, n_features, dtype, missing))

    @contextmanager
    def begun(begins):
        begins()
        yield

    monkeypatch.setattr(compiling, "compile_loops", noted)
    monkeypatch.setattr(compiling, "compilation_noted", begun)
    return asked


@pytest.mark.parametrize(("setting", "compiles"), [("always", True), ("never", False)])
def test_a_fit_that_compiles_says_so(setting, compiles, compiled_for):
    observer = Notes()
    settings = dask.config.set({"emtau.compiled": setting, "scheduler": "synchronous"})
    with settings, warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fit_estimator(mixture(max_iter=2, **START), ROWS, None, None, observer=observer)
    for thread in threading.enumerate():
        if thread.name == "emtau-compile":
            thread.join()
    assert compiled_for == ([("full", 3, 2, np.dtype("f8"), False)] if compiles else [])
    assert observer.notes == ([COMPILES] if compiles else [])
