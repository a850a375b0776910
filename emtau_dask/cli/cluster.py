"""Where a run computes: threads of this process, processes of this machine, or a dask scheduler elsewhere."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from multiprocessing import resource_tracker
from types import MappingProxyType
from typing import Any

import dask

from emtau_dask.cli.config import ClusterSection
from emtau_dask.em.history import FitObserver
from emtau_dask.errors import ClusterError
from emtau_dask.interrupts import interruptible

_TLS_SETTINGS = (
    "cluster.tls (ca_file, cert, key) or, if that is not given, dask's own distributed.comm.tls "
    "(DASK_DISTRIBUTED__COMM__TLS__CA_FILE, ...__TLS__CLIENT__CERT and ...__TLS__CLIENT__KEY)"
)
LOST_WORKER_SETTINGS = {"distributed.deploy.lost-worker-timeout": "1 day"}
"""Maximum time that a worker of a local cluster may be lost before it is closed for good. On a busy machine
its process may need more than dask's 15 s to return, and the fit would wait for workers that nobody
starts."""
DASHBOARD = ("127.0.0.1", 8787)
"""Address of the dashboard of a local cluster, unless another program uses it."""


@contextmanager
def computing(
    cluster: ClusterSection, observer: FitObserver, settings: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[None]:
    """Let dask compute as a section `cluster` and further settings of dask say, until the block ends.

    If a local cluster is started, the observer is notified of the address of its dashboard. Raises
    `ClusterError` for a cluster that cannot be started or reached.
    """
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
        lost = LOST_WORKER_SETTINGS if cluster.scheduler == "processes" else {}
        stack.enter_context(dask.config.set({"scheduler": "distributed", **lost, **settings}))
        yield


def _connect(cluster: ClusterSection, stack: ExitStack, observer: FitObserver) -> None:
    """Make a client of the cluster the current one of dask, until the stack is closed."""
    from distributed import Client, LocalCluster

    if cluster.scheduler == "processes":
        with interruptible(), _interrupts_blocked():
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
    """Return the usual address of dask's dashboard, or one with any free port if it is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server's own
        host, port = DASHBOARD
        try:
            probe.bind(DASHBOARD)
        except OSError:
            port = 0
    return f"{host}:{port}"


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in the threads and processes that the block starts.

    A terminal sends Ctrl-C to all processes. Workers end when this process ends them. If they ended by
    themselves, they would print tracebacks over what the user needs to read.
    """
    resource_tracker.ensure_running()  # a thread that starts it lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _remedy(scheduler: str) -> str:
    if scheduler == "processes":
        return "Check that this machine allows new processes."
    tls = (
        ", and that the certificates are of the authority that it trusts:"
        if scheduler.startswith("tls://")
        else "; a scheduler that requires certificates needs tls:// instead of tcp://, with"
    )
    return f"Check that a dask scheduler runs there and that this machine can reach it{tls} {_TLS_SETTINGS}."


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
            f"cluster.scheduler = {cluster.scheduler} needs a certificate, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing: set {_TLS_SETTINGS}."
        )
    try:
        security.get_connection_args("client")
    except (OSError, ValueError) as error:
        files["key"] = security.tls_client_key
        # A value of several lines is the key itself, not its path.
        paths = ", ".join(f"{name} {path}" for name, path in files.items() if path and "\n" not in path)
        raise ClusterError(
            f"cluster.scheduler = {cluster.scheduler}: the certificate cannot be read "
            f"({type(error).__name__}: {error}) from {paths}. Check that these files exist, that this user "
            "may read them and that the key belongs to the certificate."
        ) from error
    return security
