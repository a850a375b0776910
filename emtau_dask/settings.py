"""The settings of a fit, each defined once, with its default and its constraint.

The estimator, run configs, options of the command line, commits and saved models have these names, defaults
and constraints. Only the standard library is imported, so that help texts can be shown without delay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from types import MappingProxyType
from typing import Annotated, Any, get_args, get_type_hints

from emtau_dask.constraints import FLAG, NONE, Constraint, choice, either, integer, number
from emtau_dask.errors import ConfigError, short

AUTO = "auto"
"""The value of settings that the shape of the data decides."""
POLICIES = ("em", "em-tau", "em-star", "em-lazy", "em-sampled")
COVARIANCE_TYPES = ("full", "tied", "diag", "spherical", "tied_diag", "tied_spherical")
STARTS = ("kmeans", "k-means++", "random", "random_from_data")
RAISE, DROP, MARGINALISE = "raise", "drop", "marginalise"
"""What NaN means: an error, a row that is not used, or a missing value."""
SPELLINGS = MappingProxyType({"marginalize": MARGINALISE})
SEED = integer(0, 2**32 - 1)
NamedOrPolicy = Annotated[Any, "AUTO, one of `POLICIES`, or a policy"]


@dataclass(frozen=True, eq=False)
class Settings:
    """The settings in the order of the estimator's parameters, whose docstrings give their meaning.

    ``random_state`` is None for a generator, too, because its state would not be the same later.
    """

    n_components: Annotated[int, integer(1, 2**24)] = 1
    covariance_type: Annotated[str, choice(*COVARIANCE_TYPES)] = "full"
    algorithm: NamedOrPolicy = AUTO
    tol: Annotated[float | str, either(number(0), choice(AUTO, "statistical"))] = AUTO
    reg_covar: Annotated[float, number(0)] = 1e-6
    max_iter: Annotated[int, integer(0)] = 500
    n_init: Annotated[int | str, either(integer(1, 10_000), choice(AUTO))] = AUTO
    init_params: Annotated[str, choice(*STARTS)] = "kmeans"
    weights_init: Any = None
    means_init: Any = None
    precisions_init: Any = None
    random_state: Annotated[int | None, either(SEED, NONE)] = None
    warm_start: Annotated[bool, FLAG] = False
    checkpoint: Any = None
    checkpoint_every: Annotated[int, integer(1)] = 1
    verbose: Annotated[int | bool, either(integer(0), FLAG)] = 0
    acceleration: Annotated[str | None, either(choice(AUTO, "quasi-newton"), NONE)] = AUTO
    missing: Annotated[str, choice(RAISE, DROP, MARGINALISE, *SPELLINGS)] = RAISE

    @classmethod
    def of(cls, estimator: Any) -> Settings:
        """Return the settings of an estimator in one form: Python's own numbers, one spelling."""
        values = {name: _python_value(name, getattr(estimator, name)) for name in SETTINGS}
        state, missing = estimator.random_state, estimator.missing
        values["random_state"] = int(state) if isinstance(state, Integral) else None
        values["missing"] = SPELLINGS.get(missing, missing) if isinstance(missing, str) else missing
        return cls(**values)

    def checked(self) -> Settings:
        """Return the settings; raises `ConfigError` for the first that is impossible."""
        for name in CONSTRAINTS:
            check(name, getattr(self, name))
        return self

    @property
    def automatic(self) -> bool:
        """Whether the shape of the data decides on the algorithm."""
        return isinstance(self.algorithm, str) and self.algorithm == AUTO

    @property
    def stored(self) -> dict[str, Any]:
        """The settings that are stored with a fit, by name."""
        return {name: getattr(self, name) for name in STORED}


_KINDS = get_type_hints(Settings, include_extras=True)
SETTINGS = tuple(each.name for each in fields(Settings))
CONSTRAINTS: Mapping[str, Constraint] = MappingProxyType(
    {
        name: constraint
        for name, kind in _KINDS.items()
        for constraint in get_args(kind)[1:]
        if isinstance(constraint, Constraint)
    }
)
OF_ONE_FIT = tuple(name for name in SETTINGS if name not in {*CONSTRAINTS, "algorithm"})
"""Settings that cannot be used for another fit: arrays and a place."""
STORED = tuple(name for name in SETTINGS if name not in {*OF_ONE_FIT, "verbose"})
"""Settings that are stored with a fit by their names."""


def _python_value(name: str, value: Any) -> Any:
    """Return an allowed number or flag of a setting as Python's own type, anything else unchanged."""
    if name not in CONSTRAINTS or isinstance(value, str | None) or not CONSTRAINTS[name].holds(value):
        return value
    if FLAG.holds(value):
        return bool(value)
    kind = get_args(_KINDS[name])[0]
    return float(value) if float in (kind, *get_args(kind)) else int(value)


def check(name: str, value: Any) -> None:
    """Raise `ConfigError`, which names value and limit, if a value is not allowed for a setting."""
    constraint = CONSTRAINTS[name]
    if not constraint.holds(value):
        hint = constraint.hint(value)
        raise ConfigError(f"{name} is {short(value)}; it must be {constraint.words}{hint}.")


def missing_values(missing: Any) -> str:
    """Return what NaN means, in one spelling; raises `ConfigError` for an impossible setting."""
    check("missing", missing)
    return SPELLINGS.get(missing, str(missing))


def marginalises(missing: Any) -> bool:
    """Return whether NaN means a missing value; raises `ConfigError` for an impossible setting."""
    return missing_values(missing) == MARGINALISE
