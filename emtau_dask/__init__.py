"""Fit Gaussian mixtures to files of any size, with scikit-learn's API."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emtau_dask.checkpoint.run import open_run
    from emtau_dask.errors import (
        CheckpointCorruptError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointMismatchError,
        CheckpointTakenError,
        ClusterError,
        ConfigError,
        EmtauError,
        InvalidDataError,
        SingularComponentError,
        StorageError,
    )
    from emtau_dask.estimator import GaussianMixture
    from emtau_dask.estimator.outliers import MixtureOutlierDetector
    from emtau_dask.policies import EMLazy, EMSampled, EMStar, EMTau, FullEM
    from emtau_dask.selection import select_components

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointMismatchError",
    "CheckpointTakenError",
    "ClusterError",
    "ConfigError",
    "EMLazy",
    "EMSampled",
    "EMStar",
    "EMTau",
    "EmtauError",
    "FullEM",
    "GaussianMixture",
    "InvalidDataError",
    "MixtureOutlierDetector",
    "SingularComponentError",
    "StorageError",
    "open_run",
    "select_components",
]

_POLICIES = ("EMLazy", "EMSampled", "EMStar", "EMTau", "FullEM")
_HOMES = {
    "GaussianMixture": "estimator",
    "MixtureOutlierDetector": "estimator.outliers",
    "open_run": "checkpoint.run",
    "select_components": "selection",
}
_HOMES |= dict.fromkeys(_POLICIES, "policies")


__version__ = "1.0.0"

if sys.platform == "win32":
    raise ImportError(
        "emtau_dask runs on Linux and macOS, and this is Windows: use the Windows Subsystem for Linux (WSL), "
        "or a container."
    )

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __dir__() -> list[str]:
    """Return the public names, those that are not imported yet included."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that ``emtau --help`` needs neither dask nor scikit-learn."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
