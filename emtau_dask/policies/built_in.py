"""The base of the built-in policies: parameters as scikit-learn has them, and their constraints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sklearn.base import BaseEstimator

from emtau_dask.checks import Constraint
from emtau_dask.errors import ConfigError
from emtau_dask.messages import short
from emtau_dask.policies.base import RowArray


class BuiltInPolicy(BaseEstimator):  # type: ignore[misc]
    """Base of the policies that have a name.

    Attributes
    ----------
    constraints : mapping of str to Constraint
        What each parameter of ``__init__`` may be. A run config has the same
        parameters, with the same defaults and constraints.
    """

    constraints: ClassVar[Mapping[str, Constraint]] = {}

    def row_arrays(self, n_components: int, max_iter: int) -> tuple[RowArray, ...] | None:
        """Return no arrays: the active mask is all that most policies need.

        Raises
        ------
        ConfigError
            A parameter is impossible. Not raised before a fit starts, since
            scikit-learn's ``__init__`` checks nothing.
        """
        for name, constraint in self.constraints.items():
            value = getattr(self, name)
            if not constraint.holds(value):
                raise ConfigError(
                    f"{type(self).__name__}({name}={short(value)}): {name} must be {constraint.words}."
                )
        return ()
