"""Where a command computes: threads of this process, a cluster on this machine, or one elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import dask

from emtau_dask.errors import ClusterError

if TYPE_CHECKING:
    from emtau_dask.face.config import ClusterSection, RunConfig

__all__ = ["computing"]


@contextmanager
def computing(config: RunConfig) -> Iterator[None]:
    """Compute on what `cluster` asks for, inside the block.

    Raises
    ------
    ClusterError
        The cluster cannot be started or reached.
    """
    cluster = config.cluster
    with ExitStack() as stack:
        settings: dict[str, Any] = {"scheduler": cluster.scheduler}
        if cluster.scheduler == "threads":
            if cluster.workers is not None:
                settings["num_workers"] = cluster.workers
        else:
            stack.enter_context(_client(cluster))
            settings["scheduler"] = "distributed"
        stack.enter_context(dask.config.set(settings))
        yield


@contextmanager
def _client(cluster: ClusterSection) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    with ExitStack() as stack:
        try:
            if cluster.scheduler == "processes":
                local = LocalCluster(
                    n_workers=cluster.workers or os.cpu_count(),
                    threads_per_worker=cluster.threads,
                    memory_limit=cluster.memory_limit or "auto",
                    dashboard_address=None,
                )
                address, security = stack.enter_context(local), None
            else:
                address, security = cluster.scheduler, _security(cluster)
            # One that cannot connect would stay behind as dask's default, as long as anything keeps it.
            client = stack.enter_context(Client(address, security=security, set_as_default=False))
            stack.enter_context(client.as_current())
        except (OSError, TimeoutError, ValueError, TypeError) as error:
            raise ClusterError(
                f"cluster.scheduler = {cluster.scheduler} cannot be used ({type(error).__name__}: "
                f"{error}). See "
                "that a dask scheduler runs there and that this machine can reach it; for tls:// give "
                "cluster.tls."
            ) from error
        yield client


def _security(cluster: ClusterSection) -> Any:
    from distributed import Security

    if not cluster.scheduler.startswith("tls://"):
        return None
    if cluster.tls is None:
        return Security()
    return Security(
        tls_ca_file=cluster.tls.ca_file,
        tls_client_cert=cluster.tls.cert,
        tls_client_key=cluster.tls.key,
        require_encryption=True,
    )
