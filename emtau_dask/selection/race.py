"""Which candidates are fitted to all rows: the leader, and those that may overtake it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from emtau_dask.selection.criteria import Criterion, Score, expected_loss

K = TypeVar("K")


@dataclass(frozen=True)
class Standing:
    """A candidate that was fitted to all rows.

    Attributes
    ----------
    value : float
        The criterion, by the log-likelihood of the fit to all rows.
    loss : float
        By how many nats (of all rows) the fit to the sample lies below it.
    parameters : int
    """

    value: float
    loss: float
    parameters: int


def standing(criterion: Criterion, score: Score, mean: float) -> Standing:
    """Return the standing of a candidate whose fit to all rows has ``mean`` nats per row."""
    loss = max(0.0, score.rows * mean - score.log_likelihood)
    return Standing(criterion.value(score) - 2.0 * loss, loss, score.parameters)


def leader(criterion: Criterion, scores: Mapping[K, Score], out: Sequence[K]) -> K | None:
    """Return the best candidate by its fit to the sample, the first of equals; None without any."""
    left = [key for key in scores if key not in out]
    return min(left, key=lambda key: criterion.value(scores[key])) if left else None


def challenger(
    criterion: Criterion, scores: Mapping[K, Score], fitted: Mapping[K, Standing], out: Sequence[K]
) -> K | None:
    """Return the candidate that is most likely to overtake all that are fitted to all rows; None without any.

    The first one that was fitted lost L nats by the sample, which is known now. Of another one
    ``L + (p' − p) (N/n − 1) / 2`` is expected: errors in the parameters that both have are the same.
    """
    if criterion.of_sample or not fitted:
        return None
    first = next(iter(fitted.values()))
    best = min(standing.value for standing in fitted.values())

    def expected(key: K) -> float:
        score = scores[key]
        in_sample = score.rows - score.held_out_rows
        more = score.rows * (
            expected_loss(score.parameters, in_sample, score.rows)
            - expected_loss(first.parameters, in_sample, score.rows)
        )
        return criterion.value(score) - 2.0 * max(0.0, first.loss + more)

    left = [key for key in scores if key not in fitted and key not in out and expected(key) < best]
    return min(left, key=expected) if left else None
