"""The ``algorithm`` section of a run config: a frozen model for each policy, made from its parameters."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BeforeValidator, Field, create_model

from emtau_dask.checks import integer, number
from emtau_dask.config.fields import NUMBERS, Section, allowed, optional
from emtau_dask.fit import CONSTRAINTS
from emtau_dask.policies import ALGORITHMS, ActivityPolicy

DEFAULT = "auto"
_Figure = Annotated[float | None, optional(number(0))]
_Figures = Annotated[tuple[float, ...] | None, optional(NUMBERS)]


class PublishedFigures(Section):
    """Figures that someone published for an algorithm, printed beside the measured ones.

    Attributes
    ----------
    iterations : int or None
        Iterations until it stopped.
    membership_error : float or None
        Distance of its responsibilities from traditional EM's, as the source defines it.
    seconds : float or None
        Running time on the source's machine.
    classification_error : float or None
        Fraction of rows whose label is not the most frequent one of their component.
    weights : tuple of float, or None
        Final weights of a mixture in one dimension, by component.
    means : tuple of float, or None
        Its final means.
    variances : tuple of float, or None
        Its final variances.
    """

    iterations: Annotated[int | None, optional(integer(0))] = None
    membership_error: _Figure = None
    seconds: _Figure = None
    classification_error: _Figure = None
    weights: _Figures = None
    means: _Figures = None
    variances: _Figures = None


class AlgorithmSettings(Section):
    """An algorithm by its name; `algorithm_models` adds the parameters of a policy.

    Attributes
    ----------
    name : str
        The algorithm; its parameters are keys beside it.
    """

    name: str


class ComparedSettings(AlgorithmSettings):
    """An algorithm as a line of a comparison.

    Attributes
    ----------
    published : PublishedFigures or None
        Figures that someone published for it, printed beside the measured ones.
    """

    published: PublishedFigures | None = None


class KMeansSettings(ComparedSettings):
    """Lloyd's k-means, the baseline of a comparison; it fits no mixture."""

    name: Literal["kmeans"] = "kmeans"


def algorithm_models(base: type[Section]) -> dict[str, Any]:
    """Return, for each policy's name, a model that adds the policy's parameters to ``base``."""
    models: dict[str, Any] = {}
    for name, policy in ALGORITHMS.items():
        types = get_type_hints(policy.__init__)
        fields: dict[str, Any] = {"name": (Literal[name], name)}
        for key, parameter in inspect.signature(policy).parameters.items():
            fields[key] = (Annotated[types[key], allowed(policy.constraints[key])], parameter.default)
        models[name] = create_model(f"{policy.__name__}{base.__name__}", __base__=base, **fields)
    return models


def _any_of(*models: Any) -> Any:
    return Annotated[functools.reduce(operator.or_, models), Field(discriminator="name")]


if TYPE_CHECKING:
    ComparedAlgorithm = ComparedSettings
else:
    ComparedAlgorithm = _any_of(*algorithm_models(ComparedSettings).values(), KMeansSettings)


class RunSettings(AlgorithmSettings):
    """The algorithm of a run, and those of a comparison.

    Attributes
    ----------
    acceleration : str or None
        Whether quasi-Newton steps replace EM's own between passes over all rows. ``auto``: with the
        algorithms ``auto`` and ``em-sampled``.
    compare : tuple of ComparedSettings
        The algorithms that `emtau compare` runs, each with its name and its parameters.
    """

    acceleration: Annotated[str | None, allowed(CONSTRAINTS["acceleration"])] = "auto"
    compare: tuple[ComparedAlgorithm, ...] = ()


class AutomaticSettings(RunSettings):
    """The algorithm that the shape of the data decides on."""

    name: Literal["auto"] = "auto"


RUN_ALGORITHMS: dict[str, type[RunSettings]] = {DEFAULT: AutomaticSettings, **algorithm_models(RunSettings)}


def _with_default_name(value: Any) -> Any:
    return {"name": DEFAULT, **value} if isinstance(value, dict) else value


if TYPE_CHECKING:
    RunAlgorithm = RunSettings
else:
    RunAlgorithm = Annotated[_any_of(*RUN_ALGORITHMS.values()), BeforeValidator(_with_default_name)]


def policy_of(settings: AlgorithmSettings) -> ActivityPolicy:
    """Return the activity policy that an entry of the section `algorithm` describes; k-means has none."""
    parameters = settings.model_dump(exclude={"name", "acceleration", "compare", "published"})
    return ALGORITHMS[settings.name](**parameters)


def algorithm_of(settings: AlgorithmSettings) -> ActivityPolicy | str:
    """Return what the estimator's ``algorithm`` is for a run's section `algorithm`."""
    return DEFAULT if settings.name == DEFAULT else policy_of(settings)
