"""Comparisons of worktrees: what is the same is found the same, and differences are seen."""

import importlib
import shutil
import subprocess
import sys
from math import comb
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPARE = ROOT / "benchmarks" / "compare_worktrees.py"
PLANTED = """

def _planted():
    from numpy import inf, nextafter

    estimator = __getattr__("GaussianMixture")
    fit = estimator.fit

    def fit_and_move(self, *arguments, **options):
        fit(self, *arguments, **options)
        if self.algorithm == "auto":
            self.weights_ = nextafter(self.weights_, inf)
        return self

    estimator.fit = fit_and_move


_planted()
"""


def compare(*arguments):
    command = [sys.executable, str(COMPARE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def planted(tmp_path):
    """A copy of the package whose default fits give weights that are one ulp off."""
    tree = tmp_path / "planted"
    shutil.copytree(ROOT / "emtau_dask", tree / "emtau_dask", ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "emtau_dask" / "__init__.py").open("a") as file:
        file.write(PLANTED)
    return tree


@pytest.fixture
def comparing(monkeypatch):
    monkeypatch.syspath_prepend(str(COMPARE.parent))
    return importlib.import_module("compare_worktrees")


@pytest.fixture
def trees(comparing):
    return tuple(comparing.Tree(name, Path(name), "python") for name in ("old", "new"))


@pytest.mark.docs
def test_a_worktree_is_the_same_as_itself():
    done = compare(ROOT, ROOT, "--only", "digests", "--fits", "an outlier")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("an outlier", "an outlier, moved by one ulp"):
        assert f"| {name} | same | same | same | same | same | same |" in done.stdout
    assert done.stdout.count("moved by one ulp changes parameters") == 2
    assert "differs" not in done.stdout


@pytest.mark.docs
def test_a_difference_of_one_ulp_is_named(planted):
    done = compare(ROOT, planted, "--only", "digests", "--fits", "by NumPy", "by NumPy, em-tau")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| by NumPy | **differs** | same |" in done.stdout
    assert "| by NumPy, em-tau | same | same |" in done.stdout
    assert done.stdout.splitlines()[-1] == "- by NumPy differs"


@pytest.mark.docs
def test_a_folder_without_the_package_is_refused(tmp_path):
    (tmp_path / "emtau_dask").mkdir()
    done = compare(tmp_path, ROOT, "--only", "digests")
    assert done.returncode == 1
    assert "which is not in" in done.stderr


def complaints(comparing, monkeypatch, trees, runs):
    answers = iter(runs)
    monkeypatch.setattr(comparing, "digests_of", lambda *_: next(answers))
    return comparing.compare_digests(*trees, [])


def of_control(comparing, *parameters):
    return {name: {"parameters": value} for name, value in zip(comparing.CONTROL, parameters, strict=True)}


def test_digests_that_do_not_see_a_changed_value_are_an_error(comparing, monkeypatch, trees):
    blind = of_control(comparing, "a", "a")
    found = complaints(comparing, monkeypatch, trees, [blind, blind, blind])
    assert found == [f"{name}: a value that is moved by one ulp changes no digest" for name in ("old", "new")]


def test_a_fit_that_differs_from_itself_is_an_error(comparing, monkeypatch, trees):
    once, again = of_control(comparing, "a", "b"), of_control(comparing, "c", "b")
    found = complaints(comparing, monkeypatch, trees, [once, once, again])
    assert found == [f"new: {comparing.CONTROL[0]} differs from itself"]


def test_a_fit_that_fails_in_both_is_an_error(comparing, monkeypatch, trees):
    broken = of_control(comparing, "a", "b") | {"other": {"failed": "ValueError: no"}}
    found = complaints(comparing, monkeypatch, trees, [broken, broken, of_control(comparing, "a", "b")])
    assert found == [f"{name}: other fails: ValueError: no" for name in ("old", "new")]


def test_pairs_alternate_and_their_ratios_are_those_of_each_pair(comparing, monkeypatch, trees, capsys):
    asked = []

    def figures(tree, benchmark, folder):
        asked.append(tree.name)
        return {"s": len(asked) * (2.0 if tree.name == "new" else 1.0)}

    monkeypatch.setattr(comparing, "figures_of", figures)
    comparing.print_pairs(trees, ["speed"], 3)
    assert asked == ["old", "new", "old", "new", "new", "old", "old", "new"]
    # after the two runs that are not counted: 3 and 2 * 4, 6 and 2 * 5, 7 and 2 * 8
    assert "| speed: s | 6 | 10 | 2.286 | 1.667 to 2.667 |" in capsys.readouterr().out


def coverage(n, rank):
    """How often a median lies between the values of this rank from below and from above: by counting."""
    return 1 - 2 * sum(comb(n, below) for below in range(rank)) / 2**n


@pytest.mark.parametrize("n", [6, 10, 15, 20, 25, 40])
def test_an_interval_is_the_narrowest_that_holds_a_median_with_95_percent(comparing, n):
    rank, above = comparing.interval([float(value) for value in range(n, 0, -1)])
    assert rank + above == n + 1
    assert coverage(n, int(rank)) >= 0.95 > coverage(n, int(rank) + 1)


def test_of_few_values_the_interval_holds_all(comparing):
    assert comparing.interval([2.0, 1.0, 3.0]) == (1.0, 3.0)
