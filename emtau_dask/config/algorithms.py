"""The ``algorithm`` section of a run config: one frozen model for each algorithm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from emtau_dask.config.fields import check_number, check_whole, expected, number, optional, whole
from emtau_dask.policies import ALGORITHMS


class Section(BaseModel):
    """A frozen part of a run config that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _revisit(value: object) -> object:
    what = "on-empty, a whole number of iterations of 1 or more, or null"
    if value is None or value == "on-empty":
        return value
    if isinstance(value, str):
        raise expected(what, "on-empty")
    return check_whole(value, 1, what)


def _tail(value: object) -> object:
    what = "leaves, or a fraction above 0 and at most 1"
    if value == "leaves":
        return value
    if isinstance(value, str):
        raise expected(what, "leaves")
    return check_number(value, 0.0, 1.0, what, above_low=True)


def _threshold(value: object) -> float:
    return check_number(value, 0.0, 1.0, "a probability above 0 and at most 1", above_low=True)


class EMSettings(Section):
    """Traditional EM: every row in every iteration."""

    name: Literal["em"] = "em"


class EMTauSettings(Section):
    """EM-Tau (the paper's Procedure 1).

    Attributes
    ----------
    tau : int
        A row whose most probable component stayed the same for `tau` iterations goes inactive.
    revisit : "on-empty", int or None
        When every row is made active again: when none is left or a partial pass
        settles, also every so many iterations, or never (the paper).
    """

    name: Literal["em-tau"] = "em-tau"
    tau: Annotated[int, whole(1)] = 20
    revisit: Annotated[Literal["on-empty"] | int | None, BeforeValidator(_revisit)] = "on-empty"


class EMStarSettings(Section):
    """EM* (the paper's Procedure 2).

    Attributes
    ----------
    tail : "leaves" or float
        Keep each heap's leaves, or this fraction of the lowest responsibilities.
    every : int
        Shrink the active set only after iterations divisible by this.
    """

    name: Literal["em-star"] = "em-star"
    tail: Annotated[Literal["leaves"] | float, BeforeValidator(_tail)] = "leaves"
    every: Annotated[int, whole(1)] = 1


class EMLazySettings(Section):
    """EM-Lazy (the paper's Procedure 3).

    Attributes
    ----------
    threshold : float
        Between full iterations only rows whose largest responsibility is at most this are active.
    full_every : int
        Iterations from one full pass to the next.
    """

    name: Literal["em-lazy"] = "em-lazy"
    threshold: Annotated[float, BeforeValidator(_threshold)] = 0.99
    full_every: Annotated[int, whole(1)] = 5


class KMeansSettings(Section):
    """Lloyd's k-means, the baseline of a comparison; it fits no mixture."""

    name: Literal["kmeans"] = "kmeans"


def _numbers(value: object) -> tuple[float, ...] | None:
    what = "a list of numbers"
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise expected(what)
    return tuple(check_number(item, float("-inf"), float("inf"), what) for item in value)


class PublishedFigures(Section):
    """Figures that someone published for an algorithm, printed beside ours.

    Attributes
    ----------
    iterations : int or None
        Iterations until it stopped.
    membership_error : float or None
        Distance of its responsibilities from traditional EM's, as the source defines it.
    seconds : float or None
        Running time in seconds, on the source's machine.
    classification_error : float or None
        Fraction of rows whose label is not the most frequent one of their component.
    weights, means, variances : tuple of float, or None
        Final parameters of a mixture in one dimension, by component.
    """

    iterations: Annotated[int | None, optional(whole(0))] = None
    membership_error: Annotated[float | None, optional(number(0.0))] = None
    seconds: Annotated[float | None, optional(number(0.0))] = None
    classification_error: Annotated[float | None, optional(number(0.0))] = None
    weights: Annotated[tuple[float, ...] | None, BeforeValidator(lambda value: _numbers(value))] = None
    means: Annotated[tuple[float, ...] | None, BeforeValidator(lambda value: _numbers(value))] = None
    variances: Annotated[tuple[float, ...] | None, BeforeValidator(lambda value: _numbers(value))] = None


class _Compared(Section):
    published: PublishedFigures | None = None


class ComparedEM(EMSettings, _Compared):
    """`EMSettings` as a line of a comparison."""


class ComparedEMTau(EMTauSettings, _Compared):
    """`EMTauSettings` as a line of a comparison."""


class ComparedEMStar(EMStarSettings, _Compared):
    """`EMStarSettings` as a line of a comparison."""


class ComparedEMLazy(EMLazySettings, _Compared):
    """`EMLazySettings` as a line of a comparison."""


class ComparedKMeans(KMeansSettings, _Compared):
    """`KMeansSettings` as a line of a comparison."""


ComparedAlgorithm = Annotated[
    ComparedEM | ComparedEMTau | ComparedEMStar | ComparedEMLazy | ComparedKMeans,
    Field(discriminator="name"),
]


class _Run(Section):
    compare: tuple[ComparedAlgorithm, ...] = ()


class RunEM(EMSettings, _Run):
    """`EMSettings` of a run, with what `emtau compare` sets beside it."""


class RunEMTau(EMTauSettings, _Run):
    """`EMTauSettings` of a run, with what `emtau compare` sets beside it."""


class RunEMStar(EMStarSettings, _Run):
    """`EMStarSettings` of a run, with what `emtau compare` sets beside it."""


class RunEMLazy(EMLazySettings, _Run):
    """`EMLazySettings` of a run, with what `emtau compare` sets beside it."""


def _named(value: Any) -> Any:
    return {"name": "em-tau", **value} if isinstance(value, dict) else value


Algorithm = Annotated[
    Annotated[RunEM | RunEMTau | RunEMStar | RunEMLazy, Field(discriminator="name")],
    BeforeValidator(_named),
]

_NOT_PARAMETERS = {"name", "compare", "published"}


def policy_of(settings: Section) -> Any:
    """Return the activity policy that an entry of the `algorithm` section describes.

    Parameters
    ----------
    settings : Section
        Any of the algorithms that fit a mixture, not k-means.

    Returns
    -------
    ActivityPolicy
    """
    parameters = settings.model_dump(exclude=_NOT_PARAMETERS)
    return ALGORITHMS[settings.model_dump()["name"]](**parameters)
