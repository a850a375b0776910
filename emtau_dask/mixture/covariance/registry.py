"""The covariance types there are: the only place where one is looked up."""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from emtau_dask.errors import InvalidDataError
from emtau_dask.mixture.covariance.base import CovarianceStructure
from emtau_dask.mixture.covariance.diag import DIAG
from emtau_dask.mixture.covariance.full import FULL
from emtau_dask.mixture.covariance.spherical import SPHERICAL
from emtau_dask.mixture.covariance.tied import TIED
from emtau_dask.mixture.covariance.tied_diag import TIED_DIAG
from emtau_dask.mixture.covariance.tied_spherical import TIED_SPHERICAL

_TYPES = (FULL, TIED, DIAG, SPHERICAL, TIED_DIAG, TIED_SPHERICAL)
STRUCTURES: Mapping[str, CovarianceStructure] = MappingProxyType({each.name: each for each in _TYPES})


def structure_named(covariance_type: str) -> CovarianceStructure:
    """Return the structure of a covariance type.

    Raises
    ------
    InvalidDataError
        There is no such type; names the ones there are.
    """
    try:
        return STRUCTURES[covariance_type]
    except (KeyError, TypeError):
        raise InvalidDataError(
            f"covariance_type is {covariance_type!r}; use one of {', '.join(map(repr, STRUCTURES))}."
        ) from None


def _by_name(structure: CovarianceStructure) -> tuple[Any, ...]:
    return structure_named, (structure.name,)


copyreg.pickle(CovarianceStructure, _by_name)
