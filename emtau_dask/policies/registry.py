"""The built-in policies by the names that ``algorithm`` takes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from emtau_dask.errors import ConfigError
from emtau_dask.messages import short
from emtau_dask.policies.base import ActivityPolicy
from emtau_dask.policies.built_in import BuiltInPolicy
from emtau_dask.policies.full import FullEM
from emtau_dask.policies.lazy import EMLazy
from emtau_dask.policies.sampled import EMSampled
from emtau_dask.policies.star import EMStar
from emtau_dask.policies.tau import EMTau

ALGORITHMS: Mapping[str, type[BuiltInPolicy]] = MappingProxyType(
    {"em": FullEM, "em-tau": EMTau, "em-star": EMStar, "em-lazy": EMLazy, "em-sampled": EMSampled}
)


def as_policy(algorithm: object) -> ActivityPolicy:
    """Return the policy that ``algorithm`` names or is.

    Raises
    ------
    ConfigError
        It is neither one of the names nor an object with a policy's methods.
    """
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return ALGORITHMS[algorithm]()
    if isinstance(algorithm, ActivityPolicy) and not isinstance(algorithm, type):
        return algorithm
    raise ConfigError(
        f"algorithm is {short(algorithm)}; use 'auto', {', '.join(map(repr, ALGORITHMS))}, or an object with "
        "the methods row_arrays, update and schedule."
    )
