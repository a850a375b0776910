"""What a report is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from emtau_dask.estimator import DrawnRows, GaussianMixture

LONGEST = 48


@dataclass(frozen=True, eq=False)
class Subject:
    """A fitted mixture, and what is known of its fit.

    Texts may hold anything: the page escapes them, and leaves out secrets of URLs.

    Attributes
    ----------
    model : GaussianMixture
        Fitted.
    name : str
        What it is called.
    place : str
        Where it was read from, or written to.
    data : str or None
        Where its rows are; None where that is not known.
    drawn : DrawnRows or None
        Rows to show; None where the data are not at hand.
    config : str or None
        The run's config as YAML.
    command : str or None
        The command that repeats the fit.
    finished : bool
        Whether the run has ended.
    written : str or None
        When its last commit was written.
    environment : mapping of str to str
        Versions and the like, of the fit; empty where they are not known.
    notes : tuple of str
        Remarks that were made before.
    run : str or None
        The id of a checkpointed run.
    """

    model: GaussianMixture
    name: str
    place: str
    data: str | None = None
    drawn: DrawnRows | None = None
    config: str | None = None
    command: str | None = None
    finished: bool = True
    written: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    run: str | None = None

    @property
    def rows(self) -> int:
        """Rows of weight above 0 that were fitted; 0 where the fit had no iteration."""
        history = self.model.history_
        return history[-1].rows if len(history) else 0

    @property
    def names(self) -> list[str]:
        """What the features are called, as far as 48 characters say it."""
        names = getattr(self.model, "feature_names_in_", None)
        if names is None:
            return [f"feature {i}" for i in range(self.model.n_features_in_)]
        return [text if len(text := str(name)) <= LONGEST else f"{text[: LONGEST - 1]}…" for name in names]
