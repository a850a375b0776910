"""What a worker of a local cluster does before its first task; a module that dask preloads."""

from __future__ import annotations

import logging
from typing import Any


def dask_setup(worker: Any) -> None:
    """Log no warning of a task that is cut off because its cluster is closed."""
    logging.getLogger("distributed.worker.state_machine").setLevel(logging.ERROR)
