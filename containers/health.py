"""The health check of a service, with exit 0 or 1.

    health.py scheduler 127.0.0.1:8787
    health.py worker 127.0.0.1:8788 scheduler:8787

The addresses are those of dashboards. A scheduler is healthy if its event loop answers; a worker if its own
does and the scheduler counts a worker in at an address of this host.
"""

import os
import socket
import ssl
import sys
from http.client import HTTPConnection, HTTPSConnection

SETTINGS = "DASK_DISTRIBUTED__SCHEDULER__DASHBOARD__TLS__"


def get(address: str, path: str) -> bytes:
    """Return what a service says over HTTP, or over HTTPS where dask is told to speak it."""
    connection: HTTPConnection
    if SETTINGS + "CERT" in os.environ:
        context = ssl.create_default_context(cafile=os.environ[SETTINGS + "CA_FILE"])
        connection = HTTPSConnection(address, timeout=5, context=context)
    else:
        connection = HTTPConnection(address, timeout=5)
    connection.request("GET", path)
    return connection.getresponse().read()


def is_in_the_cluster(scheduler: str) -> bool:
    """Tell whether the scheduler names a worker at an address of this host."""
    workers = get(scheduler, "/info/main/workers.html").decode()
    here = {
        entry[4][0]
        for name in (socket.gethostname(), "localhost")
        for entry in socket.getaddrinfo(name, None)
    }
    return any(f"//{address}:" in workers for address in here)


def main(service: str, dashboard: str, scheduler: str = "") -> bool:
    """Tell whether a service is healthy."""
    is_well = get(dashboard, "/health") == b"ok"
    return is_well and (service == "scheduler" or is_in_the_cluster(scheduler))


if __name__ == "__main__":
    sys.exit(not main(*sys.argv[1:]))
