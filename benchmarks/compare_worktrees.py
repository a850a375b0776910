"""Compare two states of the package on this machine: bits, shape and speed.

    python benchmarks/compare_worktrees.py main .                     # each is a folder or a revision
    python benchmarks/compare_worktrees.py v0.1.0 . --only digests    # some minutes
    python benchmarks/compare_worktrees.py main . --only pairs --pairs 20 --benchmarks speed
    python benchmarks/compare_worktrees.py main . --house house.py    # also what this script prints in each

*Digests* are those of `reference_fits.py`, of the file beside this one for both. The command ends with 1
where any differs, a fit fails, a fit that is run again in one worktree gives other digests, or one whose
data were changed by one unit in the last place gives the same.

*Pairs* are runs of a benchmark in one and in the other worktree, in alternating order, at small sizes.
Printed are the medians of both, the median of the pairs' ratios, and an interval that holds it with at least
95%, from the order statistics. Less is better in all figures. Each worktree runs its own script of the
benchmark where that has `--json`, else the one beside this file.

One interpreter runs everything; the package is that of the worktree, whatever is installed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from order_statistics import interval

HERE = Path(__file__).resolve().parent
PARTS = "parameters", "bounds", "labels", "densities", "counts", "bytes", "row state"
CONTROL = "an outlier", "an outlier, moved by one ulp"
"""Two fits that must not have the same digests: else these see nothing."""
REPEATED = CONTROL[0], "auto, full, 2 thread(s)", "em-tau, full, 2 thread(s)"
"""Fits that are run twice in one worktree, if they are among those that are run."""
BENCHMARKS = {
    "speed": "--work full-d4 full-d16 tied-d16 --scale 4 --peers --threads 2 --repeats 1 --product 200",
    "out_of_core": "--memory 20MB --chunk-rows 20000 --repeats 1",
    "memory": "--rows 200000 800000 --chunk-rows 50000",
    "checkpoint_cost": "--rows 400000 --chunk-rows 50000 --repeats 1 --every 1",
    "first_result": "",
}
"""With options for which a run takes some seconds."""


@dataclass(frozen=True)
class Tree:
    """A worktree, and the interpreter that imports its package."""

    name: str
    folder: Path
    python: str

    def run(self, *arguments: str, cwd: Path | None = None, show: bool = False) -> str:
        """Run Python with this worktree's package and return what it prints."""
        done = subprocess.run(
            [self.python, *arguments],
            cwd=cwd or tempfile.gettempdir(),
            env=os.environ | {"PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: {' '.join(arguments)} failed\n{(done.stderr or '')[-2000:]}")
        return done.stdout

    def check(self, package: str) -> None:
        if Path(package).resolve() != (self.folder / "emtau_dask" / "__init__.py").resolve():
            raise SystemExit(f"{self.name}: imports {package}, which is not in {self.folder}")


@contextmanager
def worktree(given: str, python: str) -> Iterator[Tree]:
    """Give a folder as it is, and a temporary worktree of a revision."""
    if (Path(given) / "emtau_dask").is_dir():
        yield Tree(given, Path(given).resolve(), python)
        return
    git = ["git", "-C", str(HERE.parent), "worktree"]
    with tempfile.TemporaryDirectory() as place:
        folder = str(Path(place) / "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", folder, given], check=True)
        try:
            yield Tree(given, Path(folder).resolve(), python)
        finally:
            subprocess.run([*git, "remove", "--force", folder], check=True)


def table(header: list[str], lines: list[list[str]]) -> None:
    for line in [header, ["---"] * len(header), *lines]:
        print(f"| {' | '.join(line)} |")
    print(flush=True)


# Digests


def digests_of(tree: Tree, names: list[str]) -> dict[str, dict[str, str]]:
    print(f"reference fits of {tree.name}", file=sys.stderr)
    told = ["--fits", *names] if names else []
    found: dict[str, Any] = json.loads(tree.run(str(HERE / "reference_fits.py"), *told, show=True))
    tree.check(found["package"])
    fits: dict[str, dict[str, str]] = found["fits"]
    return fits


def cells(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return, for each part, whether two fits agree in it."""
    if "failed" in one or "failed" in other:
        return ["failed", *[""] * (len(PARTS) - 1)]
    return [
        "" if part not in one | other else "same" if one.get(part) == other.get(part) else "**differs**"
        for part in PARTS
    ]


def compare_digests(baseline: Tree, new: Tree, names: list[str]) -> list[str]:
    """Print the table of digests; return what is wrong."""
    names = list(dict.fromkeys([*CONTROL, *names])) if names else []
    began = time.monotonic()
    before, after = (digests_of(tree, names) for tree in (baseline, new))
    repeated = digests_of(new, [name for name in REPEATED if name in after])
    print(f"## Digests of {len(after)} reference fits\n")
    table(["fit", *PARTS], [[name, *cells(before[name], after[name])] for name in after])
    wrong = []
    for tree, fits in ((baseline, before), (new, after)):
        wrong += [f"{tree.name}: {name} fails: {f['failed']}" for name, f in fits.items() if "failed" in f]
        moved = cells(*(fits[name] for name in CONTROL))
        if "**differs**" not in moved:
            wrong.append(f"{tree.name}: a value that is moved by one ulp changes no digest")
        seen = ", ".join(part for part, cell in zip(PARTS, moved, strict=True) if cell == "**differs**")
        print(f"Control: in {tree.name} a value that is moved by one ulp changes {seen or 'nothing'}.")
    wrong += [f"{name} differs" for name in after if "**differs**" in cells(before[name], after[name])]
    wrong += [f"{new.name}: {name} differs from itself" for name, f in repeated.items() if f != after[name]]
    print(f"Run again in {new.name}: {len(repeated)} fits. {time.monotonic() - began:.0f} s in all.\n")
    return wrong


# The house


def print_house(baseline: Tree, new: Tree, script: Path) -> None:
    columns = [tree.run(str(script.resolve()), cwd=tree.folder).splitlines() for tree in (baseline, new)]
    print("## House\n")
    lines = [[cell.strip() for cell in line] for line in itertools.zip_longest(*columns, fillvalue="")]
    table([baseline.name, new.name], lines)


# Pairs


def figures_of(tree: Tree, benchmark: str, folder: Path) -> dict[str, float]:
    """Run a benchmark and return its figures."""
    own = tree.folder / "benchmarks" / f"{benchmark}.py"
    script = own if own.exists() and '"--json"' in own.read_text() else HERE / own.name
    found = folder / "figures.json"
    tree.run(str(script), *BENCHMARKS[benchmark].split(), "--json", str(found))
    figures: dict[str, float] = json.loads(found.read_text())
    return figures


def print_pairs(trees: tuple[Tree, Tree], benchmarks: list[str], pairs: int) -> None:
    print(f"## Pairs: {pairs} of each, in turn\n")
    for benchmark in benchmarks:
        lines = []
        began = time.monotonic()
        found: tuple[list[dict[str, float]], list[dict[str, float]]] = ([], [])
        with tempfile.TemporaryDirectory() as folder:
            for tree in trees:
                figures_of(tree, benchmark, Path(folder))  # compiles, and fills the page cache
            for number in range(pairs):
                for place in (0, 1) if number % 2 == 0 else (1, 0):
                    found[place].append(figures_of(trees[place], benchmark, Path(folder)))
                print(f"{benchmark}, pair {number + 1} of {pairs}", file=sys.stderr)
        for figure in found[1][0]:
            values = [[run[figure] for run in of_tree] for of_tree in found]
            ratios = [after / before for before, after in zip(*values, strict=True)]
            low, high = interval(ratios)
            medians = [f"{statistics.median(of_tree):.4g}" for of_tree in values]
            ratio = f"{statistics.median(ratios):.3f}"
            lines.append([f"{benchmark}: {figure}", *medians, ratio, f"{low:.3f} to {high:.3f}"])
        print(f"{benchmark}: {time.monotonic() - began:.0f} s", file=sys.stderr)
        table(["figure", *(tree.name for tree in trees), "ratio", "interval"], lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("baseline", help="a folder or a revision")
    parser.add_argument("new", help="a folder or a revision")
    parser.add_argument("--only", choices=["digests", "house", "pairs"])
    parser.add_argument(
        "--fits", nargs="+", default=[], metavar="NAME", help="reference fits; by default all"
    )
    parser.add_argument("--house", type=Path, help="a script that measures the worktree it is run in")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each benchmark in each worktree")
    parser.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS))
    parser.add_argument("--python", default=sys.executable, help="interpreter with both's dependencies")
    options = parser.parse_args(arguments)
    if options.only == "house" and options.house is None:
        parser.error("--only house needs --house")
    wrong = []
    with ExitStack() as stack:
        baseline, new = trees = tuple(
            stack.enter_context(worktree(given, options.python)) for given in (options.baseline, options.new)
        )
        for tree in trees:
            tree.check(tree.run("-c", "import emtau_dask; print(emtau_dask.__file__)").strip())
        if options.only in (None, "digests"):
            wrong = compare_digests(baseline, new, options.fits)
        if options.house and options.only in (None, "house"):
            print_house(baseline, new, options.house)
        if options.only in (None, "pairs"):
            print_pairs(trees, options.benchmarks, options.pairs)
    for line in wrong:
        print(f"- {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
