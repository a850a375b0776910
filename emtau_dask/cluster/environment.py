"""What the last bits of a result depend on where tasks run."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import version

import numpy as np
import scipy
import scipy.linalg
from threadpoolctl import threadpool_info


@cache
def _environment() -> tuple[tuple[str, str], ...]:
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    blas = {f"{library['internal_api']} {library['version']}" for library in libraries}
    kinds = {str(library.get("architecture", "")) for library in libraries}
    return (
        ("python", platform.python_version()),
        ("numpy", np.__version__),
        ("scipy", scipy.__version__),
        ("blas", ", ".join(sorted(blas))),
        ("cpu", " ".join((platform.machine(), *sorted(kinds))).strip()),
    )


def numerical_environment(*, compiled: bool = False) -> dict[str, str]:
    """Return what the last bits of a result depend on: library versions and the kind of CPU.

    Of numba only where rows go by ``compiled`` tiles.
    """
    return {**dict(_environment()), **({"numba": version("numba")} if compiled else {})}
