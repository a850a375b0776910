"""One contestant of `benchmarks/speed.py`: fits the data in a folder and prints JSON.

    python benchmarks/contestants.py scikit-learn FOLDER --threads 2 --iterations 2 12

The folder holds `rows.npy` and `task.json`. A fit of the shorter length comes first and
is not timed; what is printed is when the fits of both lengths began and ended. Nothing but
NumPy is imported beside the contestant, so that a peer can live in an interpreter of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

JUDGED_ROWS = 10_000
PRODUCTS = 10


@dataclass(frozen=True)
class Task:
    """Rows and a start: weights, means and one variance for all components and features."""

    folder: Path
    rows: np.ndarray
    weights: np.ndarray
    means: np.ndarray
    variance: float
    covariance_type: str
    reg_covar: float
    chunks: int

    @property
    def chunk_rows(self) -> int:
        return -(-len(self.rows) // self.chunks)

    @property
    def covariances(self) -> np.ndarray:
        """The start's, in the shape that scikit-learn gives to this type."""
        components, features = self.means.shape
        whole = self.variance * np.eye(features)
        return {
            "full": np.broadcast_to(whole, (components, features, features)),
            "tied": whole,
            "diag": np.full((components, features), self.variance),
            "spherical": np.full(components, self.variance),
        }[self.covariance_type]


@dataclass(frozen=True)
class Mixture:
    weights: Any
    means: Any
    covariances: Any


@dataclass(frozen=True)
class Timed:
    """When the shorter and the longer fit began and ended, and what the longer one found.

    In `time.monotonic`'s seconds; nothing is said of what was found from another start than the given one.
    """

    fits: list[tuple[float, float]]
    mixture: Mixture | None
    repeated: int = 0  # passes of ours that were done again


Lengths = tuple[int, int]


def read_task(folder: Path) -> Task:
    told = json.loads((folder / "task.json").read_text())
    weights, means = (np.array(told.pop(name)) for name in ("weights", "means"))
    return Task(folder, np.load(folder / "rows.npy"), weights, means, **told)


def mean_log_likelihood(rows: np.ndarray, mixture: Mixture, covariance_type: str) -> float:
    weights, means, covariances = (np.asarray(part) for part in vars(mixture).values())
    components, features = means.shape
    if covariance_type == "spherical":
        covariances = covariances[:, np.newaxis, np.newaxis] * np.eye(features)
    elif covariance_type == "diag":
        covariances = covariances[:, :, np.newaxis] * np.eye(features)
    covariances = np.broadcast_to(covariances, (components, features, features))
    total = np.full(len(rows), -np.inf)
    for weight, mean, covariance in zip(weights, means, covariances, strict=True):
        factor = np.linalg.cholesky(covariance)
        distances = np.sum(np.linalg.solve(factor, (rows - mean).T) ** 2, axis=0)
        constant = np.log(weight) - np.sum(np.log(np.diag(factor))) - features / 2 * np.log(2 * np.pi)
        total = np.logaddexp(total, constant - distances / 2)
    return float(total.mean())


def timed(fit: Callable[[int], Mixture | None], lengths: Lengths) -> Timed:
    fit(lengths[0])
    fits, mixture = [], None
    for length in lengths:
        gc.collect()  # else the objects of imports are gone through in some iteration
        began = time.monotonic()
        mixture = fit(length)
        fits.append((began, time.monotonic()))
    return Timed(fits, mixture)


def ours(task: Task, threads: int, lengths: Lengths, dtype: type = np.float64) -> Timed:
    import dask
    import dask.array as da

    from emtau_dask import FullEM, GaussianMixture

    X = da.from_array(task.rows.astype(dtype, copy=False), chunks=(task.chunk_rows, -1))

    def fit(length: int) -> Mixture:
        model = GaussianMixture(algorithm=FullEM(), **sklearn_settings(task, length))
        with dask.config.set(scheduler="threads", num_workers=threads):
            model.fit(X)
        nonlocal repeated
        repeated = sum(record.repeated for record in model.history_)
        return Mixture(model.weights_, model.means_, model.covariances_)

    repeated = 0
    found = timed(fit, lengths)
    return replace(found, repeated=repeated)


def scikit_learn(task: Task, threads: int, lengths: Lengths) -> Timed:
    from sklearn.mixture import GaussianMixture

    def fit(length: int) -> Mixture:
        model = GaussianMixture(**sklearn_settings(task, length)).fit(task.rows)
        return Mixture(model.weights_, model.means_, model.covariances_)

    return timed(fit, lengths)


def sklearn_settings(task: Task, length: int) -> dict[str, Any]:
    whole = task.covariance_type in ("full", "tied")
    return {
        "n_components": len(task.weights),
        "covariance_type": task.covariance_type,
        "tol": 0.0,
        "reg_covar": task.reg_covar,
        "max_iter": length,
        "weights_init": task.weights,
        "means_init": task.means,
        "precisions_init": np.linalg.inv(task.covariances) if whole else 1 / task.covariances,
    }


def pomegranate(task: Task, threads: int, lengths: Lengths) -> Timed:
    import torch
    from pomegranate.distributions import Normal
    from pomegranate.gmm import GeneralMixtureModel

    torch.set_num_threads(threads)
    X = torch.from_numpy(task.rows)

    def fit(length: int) -> Mixture:
        parts = [
            Normal(torch.tensor(mean), torch.tensor(covariance), covariance_type=task.covariance_type)
            for mean, covariance in zip(task.means, task.covariances, strict=True)
        ]
        model = GeneralMixtureModel(
            parts, priors=torch.tensor(task.weights), max_iter=length, tol=-np.inf
        ).fit(X)
        means, covariances = zip(*((part.means, part.covs) for part in parts), strict=True)
        return Mixture(
            *(whole.detach().numpy() for whole in (model.priors, stack(means), stack(covariances)))
        )

    stack = torch.stack
    return timed(fit, lengths)


def bob(task: Task, threads: int, lengths: Lengths) -> Timed:
    import dask
    import dask.array as da
    from bob.learn.em import GMMMachine

    X = da.from_array(task.rows, chunks=(task.chunk_rows, -1))

    def fit(length: int) -> Mixture:
        machine = GMMMachine(
            len(task.weights),
            convergence_threshold=None,
            max_fitting_steps=length,
            weights=task.weights,
            update_variances=True,
            update_weights=True,
        )
        machine.means, machine.variances = task.means, task.covariances
        with dask.config.set(scheduler="threads", num_workers=threads):
            machine.fit(X)
        return Mixture(machine.weights, machine.means, machine.variances)

    return timed(fit, lengths)


def armadillo(task: Task, threads: int, lengths: Lengths) -> Timed:
    """Run the program that `speed.py` compiled into the folder above the task's."""
    start, fitted = task.folder / "start.f64", task.folder / "fitted.f64"
    np.concatenate([task.weights, task.means.ravel(), task.covariances.ravel()]).tofile(start)
    rows = np.load(task.folder / "rows.npy", mmap_mode="r")
    numbers = [*rows.shape, len(task.weights), *lengths, task.reg_covar]
    files = [task.folder / "rows.npy", rows.offset, start, fitted]
    command = [task.folder.parent / "armadillo_gmm", task.covariance_type, *files, *numbers]
    run = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, text=True)
    parts = np.split(np.fromfile(fitted), np.cumsum([task.weights.size, task.means.size]))
    shapes = (task.weights.shape, task.means.shape, task.covariances.shape)
    mixture = Mixture(*(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)))
    shorter, longer = (tuple(map(float, line.split())) for line in run.stdout.splitlines())
    return Timed([shorter, longer], mixture)


def spark(task: Task, threads: int, lengths: Lengths) -> Timed:
    """Fit from a start of Spark's own: it takes none."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.ml.clustering import GaussianMixture
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql import SparkSession

    file = task.folder / "rows.parquet"
    if not file.exists():
        values = pa.FixedSizeListArray.from_arrays(pa.array(task.rows.ravel()), task.rows.shape[1])
        pq.write_table(pa.table({"row": values}), file, row_group_size=task.chunk_rows)
    builder = SparkSession.builder.master(f"local[{threads}]").config("spark.driver.memory", "8g")
    session = builder.config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    stored = session.read.parquet(str(file)).repartition(task.chunks)
    X = stored.select(array_to_vector("row").alias("features")).cache()
    X.count()

    def fit(length: int) -> None:
        GaussianMixture(k=len(task.weights), tol=0.0, maxIter=length, seed=0).fit(X)

    found = timed(fit, lengths)
    session.stop()
    return found


CONTESTANTS: dict[str, Callable[[Task, int, Lengths], Timed]] = {
    "ours": ours,
    "ours-float32": partial(ours, dtype=np.float32),
    "ours-diag": ours,
    "scikit-learn": scikit_learn,
    "pomegranate": pomegranate,
    "armadillo": armadillo,
    "bob": bob,
    "spark": spark,
}
DIAGONAL = ("ours-diag", "bob")


def product_rate(size: int) -> float:
    """Return the floating-point operations per second of some matrix products, after one.

    Over all of them, as iterations are timed over all of them: the best of each would flatter
    what is short, and most where other work on the machine comes and goes.
    """
    a, b = np.random.default_rng(0).standard_normal((2, size, size))
    a @ b
    began = time.monotonic()
    for _ in range(PRODUCTS):
        a @ b
    return 2 * size**3 * PRODUCTS / (time.monotonic() - began)


def compete(name: str, task: Task, threads: int, lengths: Lengths) -> dict[str, Any]:
    if name in DIAGONAL:
        task = replace(task, covariance_type="diag")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CONTESTANTS[name](task, threads, lengths)
    judged = task.rows[:JUDGED_ROWS]
    likelihood = found.mixture and mean_log_likelihood(judged, found.mixture, task.covariance_type)
    return {"fits": found.fits, "log_likelihood": likelihood, "repeated": found.repeated}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["product", *CONTESTANTS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--iterations", type=int, nargs=2, default=[2, 12])
    parser.add_argument("--product", type=int, default=2000, help="rows of the matrices that are multiplied")
    options = parser.parse_args(arguments)
    if options.name == "product":
        found: dict[str, Any] = {"rate": product_rate(options.product)}
    else:
        task = read_task(options.folder)
        found = compete(options.name, task, options.threads, tuple(options.iterations))
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
