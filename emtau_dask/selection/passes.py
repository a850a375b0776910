"""The passes of a selection over all rows: one for the sample, one for the scores of all candidates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, TypeVar

from emtau_dask.checkpoint import fingerprint, sampled_contents
from emtau_dask.cluster import prove_access
from emtau_dask.em import FitObserver, Problem, first_unusable_row_named, make_problem
from emtau_dask.errors import InvalidDataError
from emtau_dask.estimator import Seeds, is_automatic
from emtau_dask.execution import Executor
from emtau_dask.fit import FitSources, open_context
from emtau_dask.io.sources import chunk_ranges
from emtau_dask.mixture.covariance import CovarianceStructure, structure_named
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.policies import as_policy, describe_policy
from emtau_dask.rows import Contents, Samples
from emtau_dask.selection.checkpoint import SampleEntry, SelectionCheckpoint, SelectionEntry, new_id
from emtau_dask.selection.counts import CountedRows, count_rows, draw_sample
from emtau_dask.selection.criteria import Score
from emtau_dask.selection.scoring import score_all
from emtau_dask.selection.settings import Candidate, SelectionSettings
from emtau_dask.selection.sizes import sample_share

T = TypeVar("T")
_OF_A_FIT: tuple[str, ...] = ("n_components", "covariance_type", "random_state", "verbose", "checkpoint")
_OF_A_FIT += ("algorithm", "weights_init", "means_init", "precisions_init", "warm_start")
"""Settings that are not those of the selection, or are stored in another form."""


@dataclass(frozen=True, eq=False)
class SelectionPass:
    """Makes the passes of a selection.

    Attributes
    ----------
    sources : FitSources
        Rows, and weights that say how many rows each stands for.
    contents : Contents
        What they were found to hold.
    executor : Executor
    observer : FitObserver
    checkpoint : SelectionCheckpoint or None
        Which keeps scores.
    samples : Samples
        Of one share: which rows are in the sample.
    n_rows : int
        N: rows, or the sum of their weights.
    fit_seed : int
        Of all fits to the sample, so that a candidate's does not depend on the others.
    least : int
        Rows that the sample must have.
    structure : CovarianceStructure
        Of some candidate; neither the sample nor scores depend on it.
    """

    sources: FitSources
    contents: Contents
    executor: Executor
    observer: FitObserver
    checkpoint: SelectionCheckpoint | None
    samples: Samples
    n_rows: int
    fit_seed: int
    least: int
    structure: CovarianceStructure

    def _passed(self, run: Callable[[Problem], T]) -> T:
        return _passed(self.sources, self.contents, self.structure, self.executor, self.observer, run)

    @cached_property
    def _sample(self) -> CountedRows:
        found = self._passed(lambda problem: draw_sample(problem, self.samples))
        if len(found.rows) < self.least:
            raise InvalidDataError(
                f"n_components goes up to {self.least:,}, but the sample has {len(found.rows):,} of "
                f"{self.sources.rows.shape[0]:,} rows. Lower n_components, or raise sample_rows."
            )
        return found

    def sample(self) -> CountedRows:
        """Return the rows of the sample, which are read once.

        Raises
        ------
        InvalidDataError
            There are fewer than the components of a candidate, or one holds NaN or infinity.
        """
        return self._sample

    def scores(
        self, which: str, mixtures: Mapping[Candidate, MixtureParameters | None]
    ) -> dict[Candidate, Score]:
        """Return the scores of the mixtures that there are, from one pass or from the checkpoint's ``which``.

        Raises
        ------
        InvalidDataError
            A row cannot be used.
        """
        given = {candidate: mixture for candidate, mixture in mixtures.items() if mixture is not None}
        if not given:
            return {}
        by_name = {candidate.name: candidate for candidate in given}
        kept = None if self.checkpoint is None else self.checkpoint.scores(which, list(by_name))
        if kept is None:
            found = self._passed(lambda problem: score_all(problem, self.samples, list(given.values())))
            kept = dict(zip(by_name, found, strict=True))
            if self.checkpoint is not None:
                self.checkpoint.keep_scores(which, kept)
        return {by_name[name]: score for name, score in kept.items()}


def _passed(
    sources: FitSources,
    contents: Contents,
    structure: CovarianceStructure,
    executor: Executor,
    observer: FitObserver,
    run: Callable[[Problem], T],
) -> T:
    with open_context(executor, observer) as opened:
        context = replace(opened, contents=contents)
        problem = make_problem(sources.rows, sources.weights, 1, structure, executor, context, compiled=False)
        with first_unusable_row_named(problem):
            return run(problem)


def begin_passes(
    settings: SelectionSettings,
    sources: FitSources,
    checkpoint: SelectionCheckpoint | None,
    executor: Executor,
    observer: FitObserver,
) -> SelectionPass:
    """Return what makes the passes; the selection of a checkpoint goes on with its seeds.

    Raises
    ------
    CheckpointError
        Something else is there, it cannot be written, or it is of other data or settings.
    InvalidDataError
        The weights cannot be used.
    """
    structure = structure_named(settings.candidates[0].covariance_type)
    contents = Contents()
    n_rows = _passed(sources, contents, structure, executor, observer, count_rows)
    n_features = sources.rows.shape[1]
    most_parameters = max(candidate.n_parameters(n_features) for candidate in settings.candidates)
    share = sample_share(n_rows, n_features, most_parameters, settings.sample_rows)
    state = settings.template.random_state
    seeds = Seeds(state)
    sample_seed, fit_seed = seeds.draw(), seeds.draw()
    if checkpoint is not None:
        checkpoint.prepare()
        # The fits say in what workers differ.
        prove_access(executor.client, checkpoint.objects, sources.named())
        named = sources.named()
        found = [one for name in named for one in sampled_contents(named[name], name, executor, observer)]
        entries = {name: fingerprint(source) for name, source in named.items()}
        entry = checkpoint.begin(
            SelectionEntry(
                id=new_id(),
                candidates=[[each.n_components, each.covariance_type] for each in settings.candidates],
                settings=_stored(settings),
                random_state=int(state) if isinstance(state, Integral) else None,
                seeds=[sample_seed, fit_seed],
                share=share,
                data=entries["X"],
                sample_weight=entries.get("sample_weight"),
                samples=[
                    SampleEntry(
                        source=one.source, made_on=one.made_on, chunk=one.chunk, digest=one.digest.hex()
                    )
                    for one in found
                ],
            )
        )
        contents = entry.contents()
        contents.compare(found, chunk_ranges(sources.rows.chunk_rows))
        sample_seed, fit_seed = entry.seeds
    samples = Samples(sample_seed, (share,))
    least = settings.largest.n_components
    return SelectionPass(
        sources, contents, executor, observer, checkpoint, samples, n_rows, fit_seed, least, structure
    )


def _stored(settings: SelectionSettings) -> dict[str, Any]:
    """Return the settings of the fits as JSON has them; raises `ConfigError` where it cannot."""
    template = settings.template
    values = {name: value for name, value in template.get_params(deep=False).items() if name not in _OF_A_FIT}
    automatic = is_automatic(template.algorithm)
    values["algorithm"] = "auto" if automatic else list(describe_policy(as_policy(template.algorithm)))
    plain: dict[str, Any] = json.loads(json.dumps(values, default=float))
    return plain
