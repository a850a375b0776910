"""Weights in a selection are numbers of equal rows: what is found is what the rows, repeated, would give."""

import json
import math
from fractions import Fraction

import dask.array as da
import numpy as np
import pytest
import zarr
from commands import emtau
from scipy.stats import binom, multivariate_normal
from sklearn.mixture import GaussianMixture as SklearnMixture

from emtau_dask import CheckpointMismatchError, GaussianMixture, InvalidDataError, select_components
from emtau_dask.data.row_random import Samples, hashed_uniforms
from emtau_dask.data.source import ChunkRange
from emtau_dask.selection import fits
from emtau_dask.selection.passes import sampled_counts

RNG = np.random.default_rng(2)
N_ROWS = 800
CENTRES = np.array([[0.0, 0.0], [7.0, 0.0], [0.0, 7.0]])
ROWS = CENTRES[RNG.integers(3, size=N_ROWS)] + RNG.normal(size=(N_ROWS, 2))
WEIGHTS = RNG.integers(0, 6, size=N_ROWS)
REPEATED = np.repeat(ROWS, WEIGHTS, axis=0)
for array in (ROWS, WEIGHTS, REPEATED):
    array.setflags(write=False)


def chosen(X=ROWS, weights=WEIGHTS, n_components=(2, 3), **options):
    usual = {"random_state": 0, "estimator": GaussianMixture(algorithm="em")}
    return select_components(X, n_components, sample_weight=weights, **usual | options)


def naive_count(number, rows, share):
    """The least k of which ``P(more than k of rows) <= number``, by summing the distribution exactly."""
    share, number = Fraction(share), Fraction(number)
    above, k = Fraction(1), 0
    while True:
        above -= math.comb(rows, k) * share**k * (1 - share) ** (rows - k)
        if above <= number:
            return k
        k += 1


def test_the_sample_holds_of_each_row_what_its_number_says():
    rows, share = np.arange(3000), 0.3
    counts = RNG.integers(1, 40, size=3000).astype(float)
    held = sampled_counts(Samples(7, (share,)), ChunkRange(0, 0, 3000), rows, counts)
    numbers = hashed_uniforms((7, 1), rows)
    expected = [naive_count(u, int(s), share) for u, s in zip(numbers, counts, strict=True)]
    assert np.array_equal(held, expected)
    # Whether that is a binomial distribution: chi-square of the counts of rows that stand for 9.
    nine = sampled_counts(
        Samples(8, (share,)), ChunkRange(0, 0, 20_000), np.arange(20_000), np.full(20_000, 9.0)
    )
    seen = np.bincount(nine.astype(int), minlength=10)
    probable = 20_000 * binom.pmf(np.arange(10), 9, share)
    assert ((seen - probable) ** 2 / probable)[:7].sum() < 30


def test_rows_of_weight_one_are_drawn_as_rows_without_weights():
    plain = sampled_counts(Samples(7, (0.4,)), ChunkRange(0, 0, 500), np.arange(500), None)
    ones = sampled_counts(Samples(7, (0.4,)), ChunkRange(0, 0, 500), np.arange(500), np.ones(500))
    assert np.array_equal(plain, ones)
    assert np.array_equal(plain, hashed_uniforms((7, 1), np.arange(500)) < 0.4)


def naive_logs(mixture, rows):
    parts = zip(mixture.weights_, mixture.means_, mixture.covariances_, strict=True)
    densities = [w * multivariate_normal(m, c).pdf(rows) for w, m, c in parts]
    return np.log(np.sum(densities, axis=0)), np.stack(densities, axis=1)


def test_records_are_those_of_the_rows_repeated(tmp_path):
    """The naive computation, and scikit-learn's criteria, see every row as often as its weight says."""
    found = chosen(checkpoint=tmp_path / "c")
    root = json.loads((tmp_path / "c" / "selection.json").read_text())
    numbers = hashed_uniforms((root["seeds"][0], 1), np.arange(N_ROWS))
    held = np.array([naive_count(u, int(s), root["share"]) for u, s in zip(numbers, WEIGHTS, strict=True)])
    drawn = held > 0
    left_out = WEIGHTS - held
    assert found.n_rows_ == len(REPEATED)
    assert found.sample_rows_ == sum(held)
    assert found.best_n_components_ == 3
    for record in found.table_:
        run = tmp_path / "c" / "candidates" / f"full-{record.n_components}.zarr"
        model = GaussianMixture.resume(run, ROWS[drawn], sample_weight=held[drawn])
        logs, densities = naive_logs(model, REPEATED)
        r = densities / densities.sum(axis=1, keepdims=True)
        entropy = -np.sum(r * np.log(np.where(r > 0, r, 1)))
        assert record.log_likelihood == pytest.approx(logs.mean(), rel=1e-10)
        theirs = model.to_sklearn()
        assert record.bic == pytest.approx(theirs.bic(REPEATED), rel=1e-10)
        assert record.aic == pytest.approx(theirs.aic(REPEATED), rel=1e-10)
        assert record.icl == pytest.approx(theirs.bic(REPEATED) + 2 * entropy, rel=1e-9)
        outside = naive_logs(model, np.repeat(ROWS, left_out, axis=0))[0].mean()
        assert record.held_out == pytest.approx(outside, rel=1e-10)
        p = record.parameters
        assert record.expected_loss == pytest.approx(p * (1 / sum(held) - 1 / len(REPEATED)) / 2)
        sample = np.repeat(ROWS, held, axis=0)
        again = continued(model, sample)
        assert again.score(sample) - model.score(sample) < 1e-4
    best = found.best_estimator_
    assert continued(best, REPEATED).score(REPEATED) - best.score(REPEATED) < 1e-6


def continued(model, rows):
    """scikit-learn's EM from there."""
    start = {"weights_init": model.weights_, "means_init": model.means_, "precisions_init": model.precisions_}
    return SklearnMixture(model.n_components, **start, tol=1e-10, max_iter=2000).fit(rows)


def test_weights_change_what_is_chosen_as_repeating_the_rows_does():
    """Two components so near each other that 150 rows do not show them, and 40 times as many do."""
    rng = np.random.default_rng(4)
    X = rng.normal(size=(150, 1)) + 2.2 * rng.integers(2, size=(150, 1))
    options = {"n_components": (1, 2), "weights": None}
    assert chosen(X, **options).best_n_components_ == 1
    assert chosen(np.repeat(X, 40, axis=0), **options).best_n_components_ == 2
    assert chosen(X, **options | {"weights": np.full(150, 40)}).best_n_components_ == 2


def test_chunks_and_rows_of_weight_zero_change_nothing():
    expected = [each.bic for each in chosen().table_]
    chunked = chosen(da.from_array(ROWS, chunks=(130, 2)), da.from_array(WEIGHTS, chunks=77))
    assert [each.bic for each in chunked.table_] == pytest.approx(expected, rel=1e-9)
    junk = np.concatenate([ROWS, np.full((20, 2), 1e6)])
    found = chosen(junk, np.append(WEIGHTS, np.zeros(20)))
    assert [each.bic for each in found.table_] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (np.where(np.arange(N_ROWS) == 7, 0.5, 1.0), r"sample_weight is 0\.5 at row 7 .*whole numbers"),
        (np.where(np.arange(N_ROWS) == 7, -1, 1), "sample_weight is -1.* at row 7 .*at least 0"),
        (np.ones(3), "sample_weight has 3 values, X has 800 rows"),
        (np.full(N_ROWS, 2.0**50), "adds up to 9.01e[+]17 rows; at most 9007199254740992"),
        (np.zeros(N_ROWS), "every sample_weight is zero"),
    ],
)
def test_weights_that_count_nothing_are_refused_before_anything_is_kept(weights, said, tmp_path):
    with pytest.raises(InvalidDataError, match=said):
        chosen(weights=weights, checkpoint=tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_other_weights_are_refused_where_a_selection_is_kept(tmp_path, monkeypatch):
    first = chosen(checkpoint=tmp_path / "c")
    monkeypatch.setattr(fits, "fit_sample", None)  # Nothing is fitted again.
    again = chosen(checkpoint=tmp_path / "c")
    assert (again.best_estimator_.means_ == first.best_estimator_.means_).all()
    other = np.array(WEIGHTS)
    other[0] += 1
    for weights in (other, None):
        with pytest.raises(CheckpointMismatchError, match="sample_weight"):
            chosen(weights=weights, checkpoint=tmp_path / "c")


def test_the_command_takes_them_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    zarr.create_array(store=tmp_path / "m.zarr", data=ROWS, chunks=(100, 2))
    np.save("w.npy", WEIGHTS.astype(float))
    options = ("--components", "2:3", "--algorithm", "em", "--set", "data.weights=w.npy")
    result = emtau("select", "m.zarr", *options, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    found = chosen()
    assert values["rows"] == len(REPEATED)
    assert [each["bic"] for each in values["candidates"]] == pytest.approx(
        [each.bic for each in found.table_]
    )
