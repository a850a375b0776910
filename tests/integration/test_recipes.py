"""The recipes of the documentation run, and what they make passes the contract suites."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from contract import test_objects, test_policy_contract, test_sources
from contract.conftest import ROWS, D, Made, N, decoded

pytestmark = pytest.mark.docs
PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
FENCE = re.compile(r"^```(.*)$")


def scripts():
    """The Python of each recipe, with as many lines before it as in the page."""
    found, code, language = {}, [], None
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            code = found[line.removeprefix("## ")] = [""] * len(code)
        fence = FENCE.match(line)
        if fence:
            language = fence[1] if language is None else None
        code.append(line if language == "python" and not fence else "")
    return {name: "\n".join(lines) + "\n" for name, lines in found.items()}


RECIPES = scripts()


def test_there_are_four():
    assert list(RECIPES) == ["A policy", "A source", "A covariance type", "An object store"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_in_an_empty_folder(name, tmp_path):
    assert RECIPES[name].strip()
    script = tmp_path / "recipe.py"
    script.write_text(RECIPES[name], encoding="utf-8")
    (tmp_path / "empty").mkdir()
    command = [sys.executable, "-W", "error::UserWarning", str(script)]
    run = subprocess.run(command, cwd=tmp_path / "empty", capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{PAGE.name}: {run.stderr}"


@pytest.fixture(scope="module")
def made_by(tmp_path_factory):
    """What a recipe defines, as a module that can be pickled."""
    modules = {}

    def load(name):
        if name not in modules:
            folder = tmp_path_factory.mktemp("recipe")
            identifier = f"recipe_{len(modules)}"
            (folder / f"{identifier}.py").write_text(RECIPES[name], encoding="utf-8")
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                patch.syspath_prepend(str(folder))
                modules[name] = __import__(identifier)
        return modules[name]

    return load


def contract(module, argument):
    """The tests of a suite that need nothing but what they test."""
    tests = {name: test for name, test in vars(module).items() if name.startswith("test_")}
    return {
        name: test for name, test in tests.items() if list(inspect.signature(test).parameters) == [argument]
    }


POLICY = contract(test_policy_contract, "policy")
SOURCE = contract(test_sources, "made")
STORE = contract(test_objects, "objects")


@pytest.mark.parametrize("name", POLICY)
def test_the_policy_keeps_the_contract(name, made_by):
    POLICY[name](made_by("A policy").SureFor())


@pytest.mark.parametrize("name", SOURCE)
def test_the_source_keeps_the_contract(name, made_by, tmp_path):
    rows = ROWS.astype("float32")
    (tmp_path / "rows.raw").write_bytes(bytes(16) + rows.tobytes())
    source = made_by("A source").raw_source(tmp_path / "rows.raw", D, 10)
    chunks = (10, 10, N - 20)
    SOURCE[name](Made(source, chunks, decoded(chunks, rows), rows=rows))


@pytest.mark.parametrize("name", STORE)
def test_the_object_store_keeps_the_contract(name, made_by, tmp_path):
    store = made_by("An object store").SqliteObjects(str(tmp_path / "folder" / "objects.sqlite"))
    assert store.empty()
    store.prepare()
    STORE[name](store)


def test_the_suites_are_found():
    assert min(len(POLICY), len(SOURCE), len(STORE)) >= 4


def test_a_source_of_ones_own_gives_what_its_rows_give_in_memory(made_by, tmp_path):
    rows = np.random.default_rng(0).normal(size=(300, 2)).astype("float32")
    (tmp_path / "rows.raw").write_bytes(bytes(16) + rows.tobytes())
    recipe = made_by("A source")
    source = recipe.raw_source(tmp_path / "rows.raw", 2, 300)
    settings = {"random_state": 0, "tol": 1e-2}
    found = recipe.GaussianMixture(2, **settings).fit(source)
    expected = recipe.GaussianMixture(2, **settings).fit(rows)
    assert found.means_.tobytes() == expected.means_.tobytes()
