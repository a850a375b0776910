"""Digests of reference fits by the `emtau_dask` that is imported, as JSON.

    python benchmarks/reference_fits.py                       # all fits, a minute or two
    python benchmarks/reference_fits.py --fits "auto, tied" "a bucket"

For each fit it prints the SHA-256 of what it gave, part by part: parameters, lower bounds (with the estimated
gaps), labels, log-densities of the rows, what the history counts, the bytes that it says were read, and row
state where a checkpoint has it. Bits differ between processors, so digests are compared between two worktrees
on one machine (`compare_worktrees.py`), and never kept.

Only the public interface is used, so that the same file runs beside any version of the package: the names of
`emtau_dask`, the command `emtau`, dask's settings, and the documented format of checkpoints
(`docs/checkpoint-format.md`) for row state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import zarr

import emtau_dask
from emtau_dask import EMLazy, EMSampled, EMStar, EMTau, FullEM, GaussianMixture, select_components

Parts = dict[str, str]
Fit = Callable[[Path], Parts]

CHUNK_ROWS = 500
PARAMETERS = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_")
COUNTS = ("active_rows", "full_pass", "chunks_processed", "chunks_skipped", "accepted", "repeated")
TYPES = ("full", "tied", "diag", "spherical", "tied_diag", "tied_spherical")
POLICIES = {
    "em": FullEM(),
    "em-tau": EMTau(tau=3),
    "em-star": EMStar(),
    "em-lazy": EMLazy(full_every=3),
    "em-sampled": EMSampled(share=0.25),
    "auto": "auto",
}
ROW_STATE = "em-tau", "em-star", "em-lazy"
KILLED_AFTER = 3
"""Iterations that the checkpoint of a fit must hold before its process is killed."""


# What is digested


def digest(*arrays: Any) -> str:
    """Return the SHA-256 of dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for array in map(np.asarray, arrays):
        found.update(f"{array.dtype.str} {array.shape}".encode() + array.tobytes())
    return found.hexdigest()


def parts_of(model: GaussianMixture, X: Any, *, bytes_read: bool = True) -> Parts:
    """Return digests of a fitted model; bytes read depend on what other processes have cached."""
    found = {
        "parameters": digest(*(getattr(model, name) for name in PARAMETERS)),
        "bounds": digest(model.lower_bounds_, model.lower_bound_, [record.gap for record in model.history_]),
        "labels": digest(model.predict(X)),
        "densities": digest(model.score_samples(X)),
        "counts": digest([[getattr(record, name) for name in COUNTS] for record in model.history_]),
    }
    if bytes_read:
        found["bytes"] = digest([record.bytes_read for record in model.history_])
    return found


def manifest(run: str) -> dict[str, Any]:
    """Return the newest commit of a checkpoint."""
    commits = zarr.open_group(run, mode="r")["commits"]
    return dict(commits[str(max(int(name) for name in commits.group_keys()))].attrs)


def row_state(run: str, n_rows: int, chunk_rows: int = CHUNK_ROWS) -> str:
    """Return the digest of a checkpoint's row arrays, in the order of the rows."""
    root, commit = zarr.open_group(run, mode="r"), manifest(run)
    run_state = commit["fit"]["current"] or commit["fit"]["best"]
    array, _, step = run_state["chunks"]["key"].rpartition("/c.")
    places, fields = root[array][int(step.split(".")[0])], {}
    for chunk, (attempt, step, first_chunk, first_row, _) in enumerate(places.tolist()):
        size = min(chunk_rows, n_rows - chunk * chunk_rows)
        if attempt < 0:
            raise RuntimeError(f"chunk {chunk} of {run} has no row state")
        writer = commit["attempts"][attempt]
        rows = root[f"attempts/{writer['id']}/rows"][step, first_chunk, :, first_row : first_row + size]
        for name, values in zip(writer["fields"], rows, strict=True):
            fields.setdefault(name, []).append(values.astype("u8"))
    if "active" not in fields:
        raise RuntimeError(f"{run} has no row state")
    return digest(*(np.concatenate(fields[name]) for name in sorted(fields)))


# The data


def clusters(n_rows: int = 5000, d: int = 4, K: int = 4, *, apart: float = 2.5, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    means = apart * random.normal(size=(K, d))
    scales = random.uniform(0.5, 1.5, size=(K, d))
    labels = random.integers(K, size=n_rows)
    return random.normal(size=(n_rows, d)) * scales[labels] + means[labels]


def with_outlier(value: float = 1e3) -> np.ndarray:
    """Return few rows, one value of which is so large that its last bit counts in all sums."""
    rows = clusters(1500)
    rows[700, 1] = value
    return rows


def sorted_clusters() -> np.ndarray:
    """Return clusters chunk by chunk, two of them so far apart that their chunks soon have no active rows."""
    means = np.repeat([0.0, 1.0, 40.0, 80.0], 1000)
    return np.random.default_rng(1).normal(size=(4000, 3)) + means[:, np.newaxis]


def ill_conditioned(*narrow: int) -> np.ndarray:
    """Return four clusters, some so narrow in one direction that they are scored about their means."""
    random = np.random.default_rng(2)
    labels = np.arange(4000) % 4
    rows = random.normal(size=(4000, 4))
    for k in narrow:
        rotation, _ = np.linalg.qr(random.normal(size=(4, 4)))
        rows[labels == k] *= np.geomspace(1.0, 1e-5, 4)
        rows[labels == k] = rows[labels == k] @ rotation.T
    return rows + 4.0 * random.normal(size=(4, 4))[labels]


def near(rows: np.ndarray, K: int, seed: int = 5) -> dict[str, Any]:
    """Return a start at rows, of covariances that are all the data's own scale."""
    d = rows.shape[1]
    means = rows[np.random.default_rng(seed).choice(len(rows), K, replace=False)]
    return {
        "weights_init": np.full(K, 1 / K),
        "means_init": means,
        "precisions_init": np.tile(np.eye(d), (K, 1, 1)),
    }


def with_nan(rows: np.ndarray) -> np.ndarray:
    rows[np.random.default_rng(3).random(rows.shape) < 0.05] = np.nan
    return rows


def stored(folder: Path, rows: np.ndarray, chunk_rows: int = CHUNK_ROWS) -> str:
    path = str(folder / "rows.zarr")
    zarr.create_array(path, data=rows, chunks=(chunk_rows, rows.shape[1]))
    return path


def as_graph(rows: np.ndarray) -> da.Array:
    """Return rows that tasks of a user's own compute, from chunks of uneven length."""
    chunks = ((700, 1300, 0, 400, len(rows) - 2400), (2, rows.shape[1] - 2))
    return da.from_array(rows[:, ::-1] / 3, chunks=chunks).map_blocks(np.multiply, 3.0)[:, ::-1]


def tables(folder: Path, rows: np.ndarray, kind: str) -> str:
    import pandas as pd

    (folder / "parts").mkdir()
    parts = np.array_split(rows, 3)
    frames = [pd.DataFrame(part, columns=[f"x{i}" for i in range(rows.shape[1])]) for part in parts]
    for number, frame in enumerate(frames):
        path = folder / "parts" / f"part-{number}.{kind}"
        if kind == "npy":
            np.save(path, frame.to_numpy())
        elif kind == "parquet":
            frame.to_parquet(path, row_group_size=400)
        else:
            frame.to_csv(path, index=False)
    return str(folder / "parts" / ("part-0.csv" if kind == "csv" else "*.npy" if kind == "npy" else ""))


# The fits


def running(threads: int = 2, compiled: str = "always") -> dask.config.set:
    return dask.config.set({"scheduler": "threads", "num_workers": threads, "emtau.compiled": compiled})


def fitted(X: Any, K: int = 4, *, weights: Any = None, **settings: Any) -> GaussianMixture:
    model = GaussianMixture(K, **({"random_state": 0, "max_iter": 15} | settings))
    return model.fit(X, sample_weight=weights)


def fit(
    make: Callable[[Path], Any], folder: Path, *, threads: int = 2, compiled: str = "always", **settings: Any
) -> Parts:
    """Fit what ``make`` gives for the folder."""
    with running(threads, compiled):
        X = make(folder)
        return parts_of(fitted(X, **settings), X)


def row_state_of(policy: str, run: str, n_rows: int) -> Parts:
    """Return the digest of row state where a policy has it."""
    return {"row state": row_state(run, n_rows)} if policy in ROW_STATE else {}


def of_policy(policy: str, covariance_type: str, threads: int, folder: Path) -> Parts:
    """Fit stored rows with a checkpoint; the policies of the paper have row state there."""
    rows = clusters()
    settings = {"algorithm": POLICIES[policy], "covariance_type": covariance_type}
    run = str(folder / "run.zarr")
    found = fit(partial(stored, rows=rows), folder, threads=threads, checkpoint=run, **settings)
    return found | row_state_of(policy, run, len(rows))


def skipping(folder: Path) -> Parts:
    rows, run = sorted_clusters(), str(folder / "run.zarr")
    settings = {"algorithm": EMTau(tau=2, revisit=None), "tol": 0.0, "checkpoint": run}
    with running():
        X = stored(folder, rows)
        model = fitted(X, **settings)
        if not any(record.chunks_skipped for record in model.history_):
            raise RuntimeError("no chunk was skipped")
        return parts_of(model, X) | {"row state": row_state(run, len(rows))}


def on_cluster(folder: Path, policy: str) -> Parts:
    from distributed import Client, LocalCluster

    rows, run = clusters(), str(folder / "run.zarr")
    dask_folder = {"temporary-directory": str(folder), "emtau.compiled": "always"}
    with (
        dask.config.set(dask_folder),
        LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        if not cluster.scheduler_address.startswith("tcp://"):
            raise RuntimeError(f"no TCP cluster: {cluster.scheduler_address}")
        X = stored(folder, rows)
        model = fitted(X, algorithm=POLICIES[policy], checkpoint=run)
        found = parts_of(model, X, bytes_read=False)
    return found | row_state_of(policy, run, len(rows))


def until_killed(policy: str, data: str, run: str) -> None:
    with running():
        fitted(data, algorithm=POLICIES[policy], checkpoint=run, tol=0.0, max_iter=40)


def iterations_of(run: str) -> int:
    """Return how many iterations a checkpoint holds that another process writes; 0 while there is none."""
    try:
        state = manifest(run)["fit"]
    except (OSError, KeyError, ValueError):  # none yet, or swept meanwhile
        return 0
    return len(state["current"]["history"]["iteration"]) if state["current"] else 0


def killed(folder: Path, policy: str) -> Parts:
    """Kill a fit once its checkpoint holds some iterations, and resume it."""
    rows, run = clusters(apart=1.0), str(folder / "run.zarr")
    data = stored(folder, rows)
    with (folder / "log").open("w+") as log:
        child = subprocess.Popen(
            [sys.executable, __file__, "--until-killed", policy, data, run], stdout=log, stderr=log
        )
        while iterations_of(run) < KILLED_AFTER:
            if child.poll() is not None:
                raise RuntimeError(f"ended before it could be killed: {Path(log.name).read_text()[-500:]}")
            time.sleep(0.001)
        child.kill()
        child.wait()
    if manifest(run)["fit"]["finished"]:
        raise RuntimeError("the fit had finished when it was killed")
    with running():
        model = GaussianMixture.resume(run, data)
        found = parts_of(model, data, bytes_read=False)
    return found | row_state_of(policy, run, len(rows))


@contextmanager
def bucket() -> Iterator[str]:
    """Yield the URL of an empty bucket of a server on this machine, to which the environment points."""
    import fsspec
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    os.environ |= {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        fsspec.filesystem("s3").mkdir("reference")
        yield "s3://reference"
    finally:
        server.stop()


def in_bucket(_: Path) -> Parts:
    rows = clusters(2500)
    with bucket() as url, running(compiled="auto"):
        zarr.create_array(f"{url}/rows.zarr", data=rows, chunks=(CHUNK_ROWS, rows.shape[1]))
        run = f"{url}/run.zarr"
        model = fitted(f"{url}/rows.zarr", algorithm=POLICIES["em-tau"], checkpoint=run)
        return parts_of(model, f"{url}/rows.zarr") | {"row state": row_state(run, len(rows))}


def by_command(folder: Path) -> Parts:
    """Fit a table by `emtau fit`."""
    project = tomllib.loads(Path(emtau_dask.__file__).parents[1].joinpath("pyproject.toml").read_text())
    module, function = project["project"]["scripts"]["emtau"].split(":")
    data, out = tables(folder, clusters(), "csv"), folder / "out"
    program = f"import sys; from {module} import {function}; sys.exit({function}())"
    command = [sys.executable, "-c", program, "fit", data, "-k", "4", "-o", str(out)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    model = GaussianMixture.load(str(out / "model.zarr"))
    return {
        "parameters": digest(*(getattr(model, name) for name in PARAMETERS)),
        "bounds": digest(model.lower_bound_),
        "labels": digest(zarr.open_group(str(out / "labels.zarr"), mode="r")["labels"][:]),
    }


def selected(folder: Path) -> Parts:
    X = stored(folder, clusters())
    with running(compiled="auto"):
        return parts_of(
            select_components(X, [2, 4], covariance_types=("full", "diag"), random_state=0).best_estimator_, X
        )


def without_numba(name: str, _: Path) -> Parts:
    """Fit in a process that cannot import numba."""
    arguments = [__file__, "--fits", name]
    program = (
        "import runpy, sys; sys.modules['numba'] = None; "
        f"sys.argv = {arguments!r}; runpy.run_path({__file__!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    found: Parts = json.loads(done.stdout)["fits"][name]
    return found


def reference_fits() -> dict[str, Fit]:
    def in_memory(rows: np.ndarray, **settings: Any) -> Fit:
        return partial(fit, lambda _: rows, **settings)

    def of_table(kind: str) -> Fit:
        return partial(fit, lambda folder: tables(folder, clusters(), kind), algorithm=POLICIES["em-tau"])

    wide = clusters(1200, 784, 3)
    many = clusters(6000, 16, 40, apart=4.0)
    moved = with_outlier(np.nextafter(1e3, np.inf))
    found: dict[str, Fit] = {
        "an outlier": in_memory(with_outlier(), compiled="never"),
        "an outlier, moved by one ulp": in_memory(moved, compiled="never"),
    }
    for policy in POLICIES:
        for threads in (1, 2):
            found[f"{policy}, full, {threads} thread(s)"] = partial(of_policy, policy, "full", threads)
    for covariance_type in TYPES[1:]:
        for policy in ("auto", "em-tau"):
            found[f"{policy}, {covariance_type}"] = partial(of_policy, policy, covariance_type, 2)
    return found | {
        "784 features": in_memory(wide, K=3, algorithm=FullEM(), max_iter=3, compiled="auto"),
        "784 features, diag, em-tau": in_memory(
            wide, K=3, algorithm=EMTau(tau=2), covariance_type="diag", max_iter=5
        ),
        "missing values": in_memory(
            with_nan(clusters()), algorithm="em", missing="marginalise", max_iter=5, compiled="auto"
        ),
        "sample weights, auto": in_memory(clusters(), weights=np.linspace(0.0, 3.0, 5000)),
        "sample weights, em-tau": in_memory(
            clusters(), algorithm=EMTau(tau=2), weights=np.linspace(0.0, 3.0, 5000)
        ),
        "some components ill-conditioned": in_memory(
            ill_conditioned(0, 2), algorithm=FullEM(), reg_covar=1e-12, init_params="k-means++"
        ),
        "all components ill-conditioned": in_memory(
            ill_conditioned(0, 1, 2, 3), algorithm=FullEM(), reg_covar=1e-12, init_params="k-means++"
        ),
        "many components far apart": in_memory(many, K=40, algorithm=FullEM(), max_iter=4, **near(many, 40)),
        "float32 rows": in_memory(clusters().astype("f4")),
        "three starts": in_memory(clusters(apart=1.0), n_init=3, init_params="random_from_data"),
        "a graph": partial(fit, lambda _: as_graph(clusters()), algorithm=POLICIES["em-tau"]),
        "a pattern of .npy files": of_table("npy"),
        "a folder of parquet files": of_table("parquet"),
        "a CSV file": of_table("csv"),
        "a CSV file, emtau fit": by_command,
        "a bucket": in_bucket,
        "chunks skipped": skipping,
        "select_components": selected,
        "a TCP cluster, auto": partial(on_cluster, policy="auto"),
        "a TCP cluster, em-tau": partial(on_cluster, policy="em-tau"),
        "killed and resumed, auto": partial(killed, policy="auto"),
        "killed and resumed, em-tau": partial(killed, policy="em-tau"),
        "by NumPy": in_memory(clusters(), compiled="never"),
        "by NumPy, em-tau": in_memory(clusters(), compiled="never", algorithm=EMTau(tau=3)),
        "by NumPy, some ill-conditioned": in_memory(
            ill_conditioned(0, 2), algorithm=FullEM(), reg_covar=1e-12, compiled="never"
        ),
        "without numba": partial(without_numba, "by NumPy"),
        "without numba, em-tau": partial(without_numba, "by NumPy, em-tau"),
    }


def parts_or_failure(fit: Fit) -> Parts:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return fit(Path(folder))
        except Exception as error:  # the other fits are to be seen all the same
            traceback.print_exc()
            return {"failed": f"{type(error).__name__}: {error}"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fits", nargs="+", metavar="NAME", help="these alone; an unknown name lists all")
    parser.add_argument("--until-killed", nargs=3, help="fit in this process; for internal use")
    options = parser.parse_args(arguments)
    if options.until_killed:
        until_killed(*options.until_killed)
        return
    fits = reference_fits()
    names = options.fits or list(fits)
    if unknown := set(names) - set(fits):
        raise SystemExit(f"no fits: {', '.join(sorted(unknown))}. There are: {'; '.join(fits)}")
    found = {}
    for name in names:
        began = time.perf_counter()
        found[name] = parts_or_failure(fits[name])
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr)
    print(json.dumps({"package": emtau_dask.__file__, "fits": found}))


if __name__ == "__main__":
    main()
