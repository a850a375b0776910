"""What the root document of a saved model says; see `model_file`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from emtau_dask.checks import NONE, Constraint, choice, either, integer
from emtau_dask.errors import InvalidDataError
from emtau_dask.estimator.summary import STOP_REASONS
from emtau_dask.fit import CONSTRAINTS
from emtau_dask.messages import short
from emtau_dask.policies import ALGORITHMS

AUTO = "auto"


def _checked(constraint: Constraint, value: Any) -> Any:
    if not constraint.holds(value):
        raise PydanticCustomError("allowed", "it must be {words}", {"words": constraint.words})
    return value


def _allowed(constraint: Constraint) -> AfterValidator:
    return AfterValidator(partial(_checked, constraint))


_SEED = either(integer(0, 2**32 - 1), NONE)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AlgorithmEntry(_Entry):
    """A policy by its name, or what ``auto`` chooses; `policies.matching_policy` checks the parameters."""

    name: Annotated[str, _allowed(choice(AUTO, *ALGORITHMS))]
    params: dict[str, Any]


class SettingsEntry(_Entry):
    """The estimator's settings but the policy; they may be what they may be for a fit."""

    covariance_type: Any
    tol: Any
    reg_covar: Any
    max_iter: Any
    n_init: Any
    init_params: Any
    warm_start: Any
    acceleration: Any
    missing: Any
    random_state: Any

    @field_validator("*")
    @classmethod
    def _checked(cls, value: Any, field: ValidationInfo) -> Any:
        return _checked(CONSTRAINTS.get(str(field.field_name), _SEED), value)


class ModelEntry(_Entry):
    """All but the arrays; ``algorithm`` is None for a policy of the user's own. Others may add to it."""

    model_config = ConfigDict(extra="ignore")

    settings: SettingsEntry
    algorithm: AlgorithmEntry | None
    stop_reason: Annotated[str, _allowed(choice(*STOP_REASONS))]
    feature_names: list[str] | None
    notes: list[str] = []
    sha256: str


def model_entry(values: Mapping[str, Any]) -> ModelEntry:
    """Return the entry of plain values; raises `InvalidDataError`, which names the first bad field."""
    try:
        return ModelEntry.model_validate(values)
    except ValidationError as error:
        raise InvalidDataError(_problem(error.errors(include_url=False)[0])) from None


def check_names(names: Sequence[str] | None, n_features: int) -> None:
    """Raise `InvalidDataError` unless stored names of features, if there are any, are one for each."""
    if names is not None and (len(names) != n_features or len(set(names)) < n_features):
        raise InvalidDataError(
            f"feature_names is {short(names)}: it must be a list of {n_features} different names"
        )


def _problem(found: ErrorDetails) -> str:
    field = short(".".join(map(str, found["loc"])))[1:-1]
    if found["type"] == "missing":
        return f"{field} is missing"
    return f"{field} is {short(found['input'])}: {found['msg'][:1].lower()}{found['msg'][1:]}"
