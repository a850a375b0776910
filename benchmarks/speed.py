"""Time of a full EM iteration, ours beside the peers that are installed.

    python benchmarks/speed.py                                   # everything: long
    python benchmarks/speed.py --work full-d16 --peers scikit-learn
    python benchmarks/speed.py --python bob=bob-venv/bin/python --mnist mnist12456.npz
    python benchmarks/speed.py --work full-d4 full-d32 --peers scikit-learn --conditions 1e4 1e6 1e8
    python benchmarks/speed.py --work many-d16 many-d32 --components 1024 --peers
    python benchmarks/speed.py --scale 5000 --most-features 32 --repeats 1 --iterations 1 2

All have the same rows, start and number of threads. Ours come in chunks of at most 16 MiB, as
many for each thread. Every fit is a process of its own, all
contestants in turn; the time of an iteration is that of a longer fit less that of a shorter
one, over the iterations between, and a figure is the median over the repeats. Times are
without those in which the whole machine stood still (`pauses.py`), where that can be seen.

With --components, all work has so many. With --conditions, drawn rows of full covariances are
fitted once more for each condition number, which the covariances of a quarter of the components
then have; beside, theirs are 9 at most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from pauses import Pauses

HERE = Path(__file__).parent
CHUNK_BYTES = 2**24
REG_COVAR = 1e-6
LEAST_ROWS_PER_COMPONENT = 10
ONE_IN = 4
"""Of the components, the share that is ill-conditioned where some are."""


@dataclass(frozen=True)
class Work:
    name: str
    rows: int
    features: int
    components: int
    covariance_type: str = "full"
    iterations: tuple[int, int] = (2, 12)
    spread: float = 3.0
    float32: bool = False
    condition: float | None = None

    def __str__(self) -> str:
        near = "" if self.spread == 3 else f", means {self.spread:g} apart"
        ill = "" if self.condition is None else f", condition {self.condition:.0e}"
        return f"{self.covariance_type} {self.rows:,} x {self.features}, K = {self.components}{near}{ill}"


WORK = {
    work.name: work
    for work in (
        Work("full-d4", 1_000_000, 4, 8, iterations=(2, 22)),
        Work("full-d16", 400_000, 16, 16),
        Work("full-d32", 100_000, 32, 64),
        Work("mnist", 29_881, 42, 5, iterations=(2, 42)),
        Work("full-d128", 20_000, 128, 8),
        Work("full-d784", 3_000, 784, 5),
        Work("diag-d16", 1_000_000, 16, 16, "diag"),
        Work("spherical-d16", 1_000_000, 16, 16, "spherical"),
        Work("tied-d16", 1_000_000, 16, 16, "tied"),
        Work("full-near", 400_000, 16, 16, spread=0.3, float32=True),
        Work("diag-near", 1_000_000, 16, 16, "diag", spread=1.0, float32=True),
        Work("many-d16", 1_000_000, 16, 256, iterations=(1, 4)),
        Work("many-d32", 1_000_000, 32, 256, iterations=(1, 4)),
        Work("many-near", 1_000_000, 16, 256, iterations=(1, 4), spread=1.0),
    )
}


@dataclass(frozen=True)
class Peer:
    """What a peer can fit, the module it needs, and what to install where that is missing."""

    types: tuple[str, ...]
    module: str | None
    remedy: str


PEERS = {
    "scikit-learn": Peer(("full", "tied", "diag", "spherical"), "sklearn", "pip install scikit-learn"),
    "pomegranate": Peer(("full", "diag"), "pomegranate.gmm", "pip install pomegranate"),
    "armadillo": Peer(("full", "diag"), None, "apt-get install g++ libarmadillo-dev"),
    "bob": Peer(("full", "diag"), "bob.learn.em", "pip install bob.learn.em, and give its --python bob=PATH"),
    "spark": Peer(("full",), "pyspark.ml", "pip install pyspark pandas pyarrow, and a Java runtime"),
}


@dataclass
class Measured:
    """What was found on one row of work, by contestant and threads."""

    work: Work
    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    rates: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    log_likelihoods: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    repeated: int = 0

    def median(self, name: str, threads: int) -> float | None:
        seconds = self.seconds.get((name, threads))
        return statistics.median(seconds) if seconds else None

    def rate(self, threads: int) -> float:
        return statistics.median(self.rates[threads])

    def difference(self, name: str) -> float | None:
        """Largest difference of the mean log-likelihood of a row from ours."""
        (mine, *_) = self.log_likelihoods[our_counterpart(self.work, name)]
        return max((abs(other - mine) for other in self.log_likelihoods.get(name, [])), default=None)


def our_counterpart(work: Work, name: str) -> str:
    """Bob has diagonal covariances only, so beside full ones it is compared with our diagonal fit."""
    return "ours-diag" if name == "bob" and work.covariance_type == "full" else "ours"


def rows_and_labels(work: Work, mnist: Path | None, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    return drawn(work) if work.name != "mnist" else digits(work, mnist, folder)


def drawn(work: Work) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(work.components, 10.0))
    means = work.spread * rng.standard_normal((work.components, work.features))
    labels = np.arange(work.rows)
    labels[work.components :] = rng.choice(work.components, work.rows - work.components, p=shares)
    rows = rng.standard_normal((work.rows, work.features))
    for component, mean in enumerate(means):
        rotation, _ = np.linalg.qr(rng.standard_normal((work.features, work.features)))
        members = labels == component
        lengths = rng.uniform(0.5, 1.5, work.features)
        if work.condition is not None and component % ONE_IN == 0:
            lengths = np.geomspace(1.0, work.condition**-0.5, work.features)
        rows[members] = rows[members] * lengths @ rotation.T + mean
    return rows, labels


def digits(work: Work, source: Path | None, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    import zarr

    from emtau_dask.datasets import make_dataset
    from emtau_dask.em.history import SilentObserver

    make_dataset("mnist", folder / "mnist.zarr", source=str(source), observer=SilentObserver())
    group = zarr.open_group(str(folder / "mnist.zarr"), mode="r")
    rows, labels = (np.asarray(group[name][: work.rows]) for name in ("X", "labels"))
    return np.ascontiguousarray(rows[:, : work.features]), np.unique(labels, return_inverse=True)[1]


def chunks_of(work: Work, threads: int) -> int:
    """Return how many chunks our rows have: as many for each thread."""
    return threads * -(-work.rows * work.features * 8 // (threads * CHUNK_BYTES))


def write_task(work: Work, folder: Path, mnist: Path | None, chunks: int) -> None:
    """Write the rows, and the start: the true components' means, one variance for all, equal weights."""
    folder.mkdir()
    rows, labels = rows_and_labels(work, mnist, folder)
    np.save(folder / "rows.npy", rows)
    members = [rows[labels == component] for component in range(work.components)]
    means = np.array([part.mean(axis=0) for part in members])
    variance = np.mean([np.mean((part - mean) ** 2) for part, mean in zip(members, means, strict=True)])
    task = {
        "weights": [1 / work.components] * work.components,
        "means": means.tolist(),
        "variance": float(variance),
        "covariance_type": work.covariance_type,
        "reg_covar": REG_COVAR,
        "chunks": chunks,
    }
    (folder / "task.json").write_text(json.dumps(task))


def run_contestant(python: str, arguments: list[str], threads: int) -> dict[str, Any]:
    """Run `contestants.py` in a process of its own and return what it prints."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    command = [python, str(HERE / "contestants.py"), *arguments]
    run = subprocess.run(
        command,
        env={**os.environ, **limits},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(run.stdout.splitlines()[-1])


def installed(name: str, python: str, folder: Path) -> bool:
    module = PEERS[name].module
    if module is None:
        return compiled(folder)
    if name == "spark" and shutil.which("java") is None:
        return False
    search = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", search], stderr=subprocess.DEVNULL, check=False).returncode == 0


def compiled(folder: Path) -> bool:
    """Compile Armadillo's program into the folder; False where that cannot be done."""
    compiler = shutil.which("g++")
    if compiler is None:
        return False
    source, program = str(HERE / "armadillo_gmm.cpp"), str(folder / "armadillo_gmm")
    command = [compiler, "-O3", "-march=native", "-fopenmp", source, "-o", program, "-larmadillo"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def contestants(work: Work, peers: list[str]) -> list[str]:
    able = [name for name in peers if work.covariance_type in PEERS[name].types]
    extra = ["ours-float32"] if work.float32 else []
    if "bob" in able and our_counterpart(work, "bob") == "ours-diag":
        extra.append("ours-diag")
    return ["ours", *extra, *able]


def measure(
    work: Work, folder: Path, peers: list[str], pauses: Pauses, options: argparse.Namespace
) -> Measured:
    write_task(work, folder, options.mnist, chunks_of(work, max(options.threads)))
    short, long = options.iterations or work.iterations
    measured = Measured(work)
    failed: set[str] = set()
    for repeat in range(options.repeats):
        for threads in options.threads:
            shared = [str(folder), "--threads", str(threads), "--product", str(options.product)]
            product = run_contestant(sys.executable, ["product", *shared], threads)
            measured.rates[threads].append(product["rate"])
            for name in contestants(work, peers):
                if name in failed:
                    continue
                lengths = ["--iterations", str(short), str(long)]
                try:
                    found = run_contestant(options.python[name], [name, *shared, *lengths], threads)
                except subprocess.CalledProcessError as error:
                    if name.startswith("ours"):
                        raise SystemExit(error.stderr) from error
                    failed.add(name)
                    print(f"{name} fails on {work}: {last_line(error.stderr)}\n")
                    continue
                shorter, longer = (pauses.seconds_without(fit) for fit in found["fits"])
                seconds = (longer - shorter) / (long - short)
                measured.seconds[name, threads].append(seconds)
                measured.repeated = max(measured.repeated, found.get("repeated", 0))
                if found["log_likelihood"] is not None:
                    measured.log_likelihoods[name].append(found["log_likelihood"])
                progress = f"{work.name} {repeat + 1}/{options.repeats}, {threads} threads, {name}"
                print(f"{progress}: {1e3 * seconds:.1f} ms", file=sys.stderr)
    return measured


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


def milliseconds(seconds: list[float]) -> str:
    median, least, most = (1e3 * value for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{median:.4g} ({least:.4g} to {most:.4g})"


def peer_cell(measured: Measured, name: str, threads: int) -> str:
    median = measured.median(name, threads)
    if median is None:
        return "-"
    counterpart = our_counterpart(measured.work, name)
    ratio = median / measured.median(counterpart, threads)
    cell = f"{milliseconds(measured.seconds[name, threads])}, x{ratio:.2f}"
    if counterpart != "ours":
        cell += f" of diag {milliseconds(measured.seconds[counterpart, threads])}"
    return cell


def fraction_cell(measured: Measured, threads: int) -> str:
    work = measured.work
    if work.covariance_type != "full":
        return "-"
    least = 2 * work.rows * work.components * work.features**2
    return f"{least / measured.median('ours', threads) / measured.rate(threads):.3f}"


def table(title: str, header: list[str], lines: list[list[str]]) -> None:
    print(f"{title}\n")
    for line in [header, ["---"] * len(header), *lines]:
        print(f"| {' | '.join(line)} |")
    print()


def print_times(found: list[Measured], peers: list[str], threads: int) -> None:
    lines = []
    for measured in found:
        ours = milliseconds(measured.seconds["ours", threads])
        rate = f"{measured.rate(threads) / 1e9:.1f}"
        cells = [peer_cell(measured, name, threads) for name in peers]
        lines.append([str(measured.work), ours, fraction_cell(measured, threads), rate, *cells])
    header = ["work", "ours", "of the product rate", "product rate, GFlop/s", *peers]
    title = f"Milliseconds per iteration, {threads} threads: median (least to most), x peer / ours"
    table(title, header, lines)


def print_scaling(found: list[Measured], threads: int) -> None:
    lines = []
    for measured in found:
        ours = measured.median("ours", 1) / measured.median("ours", threads)
        product = measured.rate(threads) / measured.rate(1)
        lines.append([str(measured.work), f"{ours:.2f}", f"{product:.2f}", f"{ours / product:.2f}"])
    header = ["work", "ours", "matrix product", "ours / matrix product"]
    table(f"Speed of {threads} threads over that of one", header, lines)


def print_conditions(found: list[Measured], threads: list[int]) -> None:
    well = {measured.work: measured for measured in found if measured.work.condition is None}
    lines = []
    for measured in found:
        if measured.work.condition is None:
            continue
        for number in threads:
            ratio = measured.median("ours", number) / well[replace(measured.work, condition=None)].median(
                "ours", number
            )
            lines.append([str(measured.work), str(number), f"{ratio:.2f}", str(measured.repeated)])
    if lines:
        header = ["work", "threads", "time over well-conditioned", "passes done again"]
        table("Ill-conditioned components: our time over that of well-conditioned ones", header, lines)


def print_float32(found: list[Measured], threads: list[int]) -> None:
    lines = []
    for measured in found:
        for number in threads if measured.work.float32 else []:
            wide, narrow = (measured.seconds[name, number] for name in ("ours", "ours-float32"))
            ratio = statistics.median(wide) / statistics.median(narrow)
            times = [milliseconds(wide), milliseconds(narrow)]
            lines.append([str(measured.work), str(number), *times, f"{ratio:.2f}"])
    if lines:
        header = ["work", "threads", "float64 rows", "float32 rows", "float64 / float32"]
        table("Our rows of float32, milliseconds per iteration", header, lines)


def print_differences(found: list[Measured], peers: list[str]) -> None:
    names = ["ours-float32", *peers]
    lines = []
    for measured in found:
        values = [measured.difference(name) for name in names]
        lines.append([str(measured.work), *("-" if value is None else f"{value:.1e}" for value in values)])
    title = (
        f"Largest difference from our mean log-likelihood after as many iterations, nats per row "
        f"(reg_covar = {REG_COVAR:g} is scikit-learn's and ours; Spark takes no start)"
    )
    table(title, ["work", *names], lines)


def figures(found: list[Measured]) -> dict[str, float]:
    return {
        f"{measured.work}, {name}, {threads} threads, ms": 1e3 * statistics.median(seconds)
        for measured in found
        for (name, threads), seconds in measured.seconds.items()
        if name.startswith("ours")
    }


def interpreter(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH with a NAME of {', '.join(PEERS)}")
    return name, path


def scaled(work: Work, scale: int, most_features: int | None) -> Work:
    least = min(work.rows, LEAST_ROWS_PER_COMPONENT * work.components)
    features = min(work.features, most_features or work.features)
    return replace(work, rows=max(work.rows // scale, least), features=features)


def wanted(options: argparse.Namespace) -> list[Work]:
    """Return the rows of the table; those of a condition follow those without."""
    found = []
    for name in options.work:
        work = WORK[name]
        work = replace(work, components=options.components or work.components)
        work = scaled(work, options.scale, options.most_features)
        ill = work.covariance_type == "full" and name != "mnist"
        found += [work, *(replace(work, condition=number) for number in (options.conditions if ill else []))]
    return found


def main(arguments: list[str] | None = None) -> list[Measured]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", nargs="+", choices=WORK, default=list(WORK), metavar="NAME", help=", ".join(WORK)
    )
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--iterations", type=int, nargs=2, help="of the shorter and of the longer fit")
    parser.add_argument("--scale", type=int, default=1, help="divide the rows by this")
    parser.add_argument("--most-features", type=int, help="take no more than the first so many features")
    parser.add_argument("--components", type=int, help="in place of those of the work")
    parser.add_argument("--conditions", type=float, nargs="+", default=[], help="of some covariances")
    parser.add_argument("--product", type=int, default=2000, help="rows of the matrices that are multiplied")
    parser.add_argument("--mnist", type=Path, help="as `emtau dataset mnist --source`")
    parser.add_argument("--python", type=interpreter, action="append", default=[], metavar="PEER=PATH")
    parser.add_argument("--folder", type=Path, help="where the temporary files go")
    parser.add_argument("--json", type=Path, help="write our figures to this file, too")
    options = parser.parse_args(arguments)
    options.python = defaultdict(lambda: sys.executable, options.python)
    if options.mnist is None and "mnist" in options.work:
        options.work.remove("mnist")
        print("mnist is left out: give the images with --mnist FILE.npz\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as place, Pauses() as pauses:
        peers = []
        for name in options.peers:
            if installed(name, options.python[name], Path(place)):
                peers.append(name)
            else:
                print(f"{name} is left out: {PEERS[name].remedy}\n")
        found = []
        for work in wanted(options):
            folder = Path(place) / work.name
            found.append(measure(work, folder, peers, pauses, options))
            shutil.rmtree(folder)
    for threads in options.threads:
        print_times(found, peers, threads)
    for threads in sorted({*options.threads} - {1}) if 1 in options.threads else []:
        print_scaling(found, threads)
    print_conditions(found, options.threads)
    print_float32(found, options.threads)
    print_differences(found, peers)
    if options.json:
        options.json.write_text(json.dumps(figures(found)))
    return found


if __name__ == "__main__":
    main()
