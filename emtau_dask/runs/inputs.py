"""What a config describes, made: rows, estimator, cluster."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path
from types import MappingProxyType
from typing import Any

import dask
import numpy as np
import zarr
from numpy.typing import NDArray

from emtau_dask.config.schema import (
    ClusterSection,
    DataSection,
    DatasetOptions,
    MnistOptions,
    RunConfig,
    algorithm_of,
)
from emtau_dask.data.opening import as_source, column_names, has_columns, open_column, open_source
from emtau_dask.data.source import Source
from emtau_dask.data.zarr_arrays import group_source
from emtau_dask.em.history import FitObserver
from emtau_dask.em.settings import check_missing
from emtau_dask.errors import ClusterError, ConfigError, InvalidDataError
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.interrupts import interruptible
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.storage.locations import Place, paths_at, place_text
from emtau_dask.storage.urls import is_url, plain_path, suffix_of

PATH_SUFFIXES = (".zarr", ".npy", ".parquet", ".pq", ".csv", ".tsv")
MAX_START_BYTES = 2**30
_TLS_SETTINGS = (
    "cluster.tls (ca_file, cert, key) or, if that is not given, dask's own distributed.comm.tls "
    "(DASK_DISTRIBUTED__COMM__TLS__CA_FILE, ...__TLS__CLIENT__CERT and ...__TLS__CLIENT__KEY)"
)
AWAY = {"distributed.deploy.lost-worker-timeout": "1 day"}
"""How long a local cluster's worker may be away before it is closed for good. On a busy machine its process
may take longer than dask's 15 s to be back, and the fit would wait for workers that nobody starts."""
DASHBOARD = ("127.0.0.1", 8787)
"""Where the dashboard of a local cluster is, unless another program is there."""


@dataclass(frozen=True)
class Inputs:
    """What a run reads: rows (N, d), and their weights (N,) and known labels (N,) where given.

    ``outlined`` says that they are an outline of a dataset that is not made yet.
    """

    rows: Source
    weights: Source | None
    labels: Source | None
    outlined: bool


def open_inputs(config: RunConfig, *, overwrite: bool, observer: FitObserver) -> Inputs:
    """Make the dataset that a run names, if any, and open the data; only CSV is read.

    ``overwrite`` lets it replace a dataset that was made with other options.

    Raises
    ------
    ConfigError
        The format of the data has no such names as those of weights or labels.
    InvalidDataError
        Something does not exist, cannot be read, or has another number of rows.
    """
    place = data_path(config)
    missing = _missing_dataset(config.data, place, overwrite)
    if missing is not None:
        from emtau_dask.datasets import make_dataset

        options, path = missing
        make_dataset(options, path, overwrite=overwrite, observer=observer)
    return _opened(config.data, paths_at(place), None, observer)


def planned_inputs(config: RunConfig, *, overwrite: bool) -> Inputs:
    """Open the data as `open_inputs` does, but make nothing: of a dataset to make it gives an outline.

    Raises as `open_inputs`, and `InvalidDataError` for a dataset whose number of rows nobody knows before.
    """
    place = data_path(config)
    missing = _missing_dataset(config.data, place, overwrite)
    if missing is None:
        return _opened(config.data, paths_at(place), None)
    options, path = missing
    if isinstance(options, MnistOptions):
        raise InvalidDataError(
            f"{path} does not hold the dataset, and its number of rows is not known before it is made; make "
            f"it with: emtau dataset mnist {path} --source {options.source}"
        )
    from emtau_dask.datasets import outlined_dataset

    return _opened(config.data, (str(path),), outlined_dataset(options))


def _opened(
    data: DataSection, paths: Sequence[str], outline: zarr.Group | None, observer: FitObserver | None = None
) -> Inputs:
    """Open what a config reads; ``outline`` stands for a group that is not at the path yet."""
    weights = _open_column(paths, "data.weights", data.weights, outline, observer)
    labels = _open_column(paths, "data.labels", data.labels, outline, observer)
    where = place_text(paths)
    if outline is None:
        columns = _feature_columns(data, paths)
        stored = open_rows(paths, array=data.array, columns=columns, observer=observer)
    else:
        stored = group_source(outline, data.array, where)
    rows = as_source(stored, ndim=2, what=where)
    for key, column in (("data.weights", weights), ("data.labels", labels)):
        if column is not None and column.shape != rows.shape[:1]:
            raise InvalidDataError(
                f"{key} has shape {column.shape}, but {where} has {rows.shape[0]:,} rows; "
                "give one value for each row"
            )
    return Inputs(rows, weights, labels, outline is not None)


def open_rows(
    path: Place, *, array: str | None, columns: Sequence[str] | None, observer: FitObserver | None = None
) -> Source:
    """Open stored rows: ``array`` is a member of a zarr group, ``columns`` are those of parquet or CSV.

    Raises
    ------
    ConfigError
        ``array`` or ``columns`` is given for a format that has none.
    InvalidDataError
        The path or URL holds nothing that can be read.
    """
    named = has_columns(path)
    if array is not None and (named or _is_npy(path)):
        raise ConfigError(
            f"array {array!r} (data.array in a config) is a member of a zarr group, but "
            f"{place_text(path)} is none; leave it out"
        )
    if columns is not None and not named:
        raise ConfigError(
            f"columns {', '.join(columns)} (data.columns in a config) are those of parquet or CSV, "
            f"but {place_text(path)} is none; leave them out"
        )
    return open_source(path, array=array, columns=columns, observer=observer)


def data_path(config: RunConfig) -> Place:
    """Return where a run's rows are, or where the dataset that it names is made."""
    path = config.data.path
    if path is not None and not isinstance(path, str):
        return path
    return plain_path(path or str(config.output.place(f"{config.data.dataset}.zarr")))


def _is_npy(path: Place) -> bool:
    return any(suffix_of(each) == ".npy" for each in paths_at(path))


def _missing_dataset(data: DataSection, place: Place, overwrite: bool) -> tuple[DatasetOptions, Path] | None:
    """Return the options and the path of the dataset that is to be made; None where there is none to make.

    Raises `ConfigError` and `InvalidDataError` where it cannot be made, or something else is there.
    """
    options = data.dataset_options
    if options is None or not isinstance(place, str):
        return None
    if is_url(place):
        raise ConfigError(
            f"data.path = {place!r} is a URL, but the dataset {options.dataset} is made in local folders "
            "only; give a local data.path, or leave out data.dataset to read what is there"
        )
    from emtau_dask.datasets import holds_dataset

    path = Path(place)
    if path.exists() and holds_dataset(options, path):
        return None
    if path.exists() and not overwrite:
        raise InvalidDataError(
            f"{path} is not the dataset {options.dataset} with these data.dataset_options; "
            "use --overwrite to make it anew, or another data.path"
        )
    if isinstance(options, MnistOptions) and options.source is None:
        raise InvalidDataError(
            f"{path} does not hold the dataset; make it with: emtau dataset mnist {path} --source FILE.npz "
            "(or without --source, which downloads MNIST)"
        )
    return options, path


def _open_column(
    path: Place, key: str, name: str | None, outline: zarr.Group | None, observer: FitObserver | None
) -> Source | None:
    if name is None:
        return None
    if is_url(name) or "/" in name or name.endswith(PATH_SUFFIXES):
        return open_column(name, None, observer) if has_columns(name) else open_source(name)
    if outline is not None:
        return group_source(outline, name, place_text(path))
    if has_columns(path):
        return open_column(path, name, observer)
    if _is_npy(path):
        raise ConfigError(
            f"{key} = {name!r} is a name, but {place_text(path)} has no names; give the path of a file"
        )
    return open_source(path, array=name)


def _feature_columns(data: DataSection, path: Place) -> tuple[str, ...] | None:
    """Return the columns of parquet or CSV that are features: all but those of weights and labels."""
    others = {data.weights, data.labels} - {None}
    if data.columns is not None or not others or not has_columns(path):
        return data.columns
    return tuple(name for name in column_names(path) if name not in others)


def estimator_of(config: RunConfig) -> GaussianMixture:
    """Return the estimator of a run, not fitted."""
    model, stop = config.model, config.stop
    return GaussianMixture(
        model.n_components,
        covariance_type=model.covariance_type,
        algorithm=algorithm_of(config.algorithm),
        acceleration=config.algorithm.acceleration,
        tol=stop.tol,
        reg_covar=model.reg_covar,
        max_iter=stop.max_iter,
        n_init=model.n_init,
        init_params=model.init_params,
        random_state=model.random_state,
        missing=model.missing,
        checkpoint=config.checkpoint.path,
        checkpoint_every=config.checkpoint.every,
    )


def check_fittable(config: RunConfig) -> None:
    """Raise `ConfigError` where the algorithm of a run cannot fit rows with missing values, and is to."""
    policy, acceleration = algorithm_of(config.algorithm), config.algorithm.acceleration
    policy = EMSampled() if isinstance(policy, str) else policy
    given = config.model.init is not None
    check_missing(config.model.missing, policy, acceleration, responsibilities=given)


def starting_responsibilities(config: RunConfig, rows: int) -> NDArray[np.float64] | None:
    """Return the responsibilities that `model.init` starts from, shape (rows, K), or None.

    Raises
    ------
    ConfigError
        They would take more than 1 GiB.
    """
    if config.model.init is None:
        return None
    k, seed = config.model.n_components, config.model.init.dirichlet_seed
    if rows * k * 8 > MAX_START_BYTES:
        raise ConfigError(
            f"model.init.dirichlet_seed = {seed} needs {rows:,} × {k} responsibilities in memory, more than "
            f"{MAX_START_BYTES // 2**30} GiB; use model.init_params for data of this size"
        )
    return np.random.default_rng(seed).dirichlet(np.ones(k), rows)


@contextmanager
def computing(
    config: RunConfig, observer: FitObserver, settings: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[None]:
    """Let dask compute where the section `cluster` says, and by further settings, until the block ends.

    The observer is told where the dashboard of a cluster is that is started for it.

    Raises
    ------
    ClusterError
        The cluster cannot be started or reached.
    """
    cluster = config.cluster
    if cluster.scheduler == "threads":
        threads = {} if cluster.workers is None else {"num_workers": cluster.workers}
        with dask.config.set({"scheduler": "threads", **threads, **settings}):
            yield
        return
    with ExitStack() as stack:
        try:
            _connect(cluster, stack, observer)
        except (OSError, TimeoutError, ValueError, TypeError, RuntimeError) as error:
            raise ClusterError(
                f"cluster.scheduler = {cluster.scheduler} cannot be used ({type(error).__name__}: "
                f"{error}). {_remedy(cluster.scheduler)}"
            ) from error
        away = AWAY if cluster.scheduler == "processes" else {}
        stack.enter_context(dask.config.set({"scheduler": "distributed", **away, **settings}))
        yield


def _connect(cluster: ClusterSection, stack: ExitStack, observer: FitObserver) -> None:
    """Make a client of the cluster dask's current one until the stack is closed."""
    from distributed import Client, LocalCluster

    if cluster.scheduler == "processes":
        with interruptible(), _interrupts_held_back():
            local = stack.enter_context(
                LocalCluster(
                    n_workers=cluster.workers or os.cpu_count(),
                    threads_per_worker=cluster.threads,
                    memory_limit=cluster.memory_limit or "auto",
                    dashboard_address=_dashboard_address(),
                    preload=["emtau_dask.execution.scheduler"],
                )
            )
        address, security = local, None
        without = "" if find_spec("bokeh") else "; it needs bokeh: pip install bokeh"
        observer.note(f"dashboard: {local.dashboard_link}{without}")
    else:
        address, security = cluster.scheduler, _security(cluster)
    # A client that cannot connect would remain dask's default for as long as anything refers to it.
    client = stack.enter_context(Client(address, security=security, set_as_default=False))
    stack.enter_context(client.as_current())


def _dashboard_address() -> str:
    """Return the usual address of dask's dashboard, or one with any free port where that one is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's own
        host, port = DASHBOARD
        try:
            probe.bind(DASHBOARD)
        except OSError:
            port = 0
    return f"{host}:{port}"


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C never reach the threads and processes that the block starts.

    A terminal sends Ctrl-C to all processes. Workers end when this process ends them; those that ended by
    themselves would print tracebacks over what the user needs to read.
    """
    resource_tracker.ensure_running()  # a thread that starts it lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remedy(scheduler: str) -> str:
    if scheduler == "processes":
        return "See that this machine lets processes be started."
    tls = (
        ", and that the certificates are of the authority that it trusts:"
        if scheduler.startswith("tls://")
        else "; one that asks for certificates is reached by tls:// instead of tcp://, with"
    )
    return f"See that a dask scheduler runs there and that this machine can reach it{tls} {_TLS_SETTINGS}."


def _security(cluster: ClusterSection) -> Any:
    """Return the certificates for ``tls://``, after a check that they can be read; None for ``tcp://``."""
    if not cluster.scheduler.startswith("tls://"):
        return None
    from distributed import Security

    given = {}
    if (tls := cluster.tls) is not None:
        given = {"tls_ca_file": tls.ca_file, "tls_client_cert": tls.cert, "tls_client_key": tls.key}
    security = Security(require_encryption=True, **given)
    files = {"ca_file": security.tls_ca_file, "cert": security.tls_client_cert}
    missing = [name for name, path in files.items() if not path]
    if missing:
        raise ClusterError(
            f"cluster.scheduler = {cluster.scheduler} needs a certificate, and no {' and no '.join(missing)} "
            f"is given: set {_TLS_SETTINGS}."
        )
    try:
        security.get_connection_args("client")
    except (OSError, ValueError) as error:
        files["key"] = security.tls_client_key
        # A value of several lines is the key itself, not its path.
        paths = ", ".join(f"{name} {path}" for name, path in files.items() if path and "\n" not in path)
        raise ClusterError(
            f"cluster.scheduler = {cluster.scheduler}: the certificate cannot be read "
            f"({type(error).__name__}: {error}) from {paths}. See that these files are there, that this user "
            "may read them and that the key is the certificate's."
        ) from error
    return security
