"""A run is resumed only with what it was begun with; both sides are named."""

import json
import shutil
import warnings

import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
from reliability.damage import manifest_of, newest_commit

from emtau_dask import EMTau, GaussianMixture
from emtau_dask.errors import CheckpointCorruptError, CheckpointMismatchError
from emtau_dask.storage.commits import VERSION
from emtau_dask.storage.objects import digested_document

_random = np.random.default_rng(2)
ROWS = _random.normal(size=(60, 2))
WEIGHTS = np.ones(60)


def lazy(rows=ROWS, chunks=20):
    return da.from_array(rows, chunks=(chunks, rows.shape[1]))


def resume(path, X, **options):
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        return GaussianMixture.resume(path, X, max_iter=6, **options)


def begun(path, X, **options):
    model = GaussianMixture(2, algorithm=EMTau(tau=2), random_state=0, max_iter=3, tol=0.0, checkpoint=path)
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        model.fit(X, **options)


@pytest.fixture
def run(tmp_path):
    begun(tmp_path / "run.zarr", lazy())
    return tmp_path / "run.zarr"


OTHER = {
    "values": (lambda: lazy(ROWS + 1), {}, r"other values .*digest is [0-9a-f]{12}.*was [0-9a-f]{12}"),
    "dtype": (lambda: lazy(ROWS.astype("f4")), {}, r"dtype <f4.*had <f8"),
    "chunks": (lambda: lazy(chunks=30), {}, r"chunks .*\(30, 2\).*had \(20, 3\)"),
    "rows": (lambda: lazy(ROWS[:40]), {}, r"shape \(40, 2\).*had \(60, 2\)"),
    "weights": (
        lazy,
        {"sample_weight": WEIGHTS},
        r"this call has sample_weight, the .* has none",
    ),
    "policy's parameters": (lazy, {"algorithm": EMTau(tau=3)}, r"tau=3.*tau=2"),
    "policy": (lazy, {"algorithm": "em-star"}, r"EMStar.*EMTau"),
}


@pytest.mark.parametrize("what", OTHER)
def test_something_else(run, what):
    make, options, names = OTHER[what]
    with pytest.raises(CheckpointMismatchError, match=names):
        resume(run, make(), **options)
    resume(run, lazy())


def test_other_weights(tmp_path):
    path = tmp_path / "run.zarr"
    begun(path, lazy(), sample_weight=WEIGHTS)
    with pytest.raises(CheckpointMismatchError, match=r"sample_weight holds other values"):
        resume(path, lazy(), sample_weight=2 * WEIGHTS)
    with pytest.raises(CheckpointMismatchError, match=r"run has sample_weight, this call has none"):
        resume(path, lazy())
    resume(path, lazy(), sample_weight=WEIGHTS)


def test_other_feature_names(tmp_path):
    path = tmp_path / "run.zarr"
    begun(path, pd.DataFrame(ROWS, columns=["a", "b"]))
    with pytest.raises(CheckpointMismatchError, match=r"\['b', 'a'\].*\['a', 'b'\]"):
        resume(path, pd.DataFrame(ROWS, columns=["b", "a"]))


def test_another_version_of_the_format(run):
    file = run / "zarr.json"
    root = json.loads(file.read_bytes())["attributes"]
    del root["sha256"]
    file.write_bytes(digested_document({**root, "version": VERSION + 1}))
    with pytest.raises(CheckpointMismatchError, match=rf"version {VERSION + 1}; .*reads .*version {VERSION}"):
        resume(run, lazy())


IMPOSSIBLE = {
    "an unknown field": (("fit", "extra"), 1, r"fit\.extra is 1: there is no such field"),
    "more iterations than there are": (("fit", "current", "since_full_pass"), 99, "an impossible history"),
    "a key elsewhere": (
        ("fit", "current", "parameters", "means", "key"),
        "attempts/../../zarr.json",
        r"refers to 'attempts/\.\./\.\./zarr\.json', which is no array of a run",
    ),
    "a setting that names a place": (
        ("config", "settings", "checkpoint"),
        "/tmp/elsewhere",
        r"config\.settings\.checkpoint is '/tmp/elsewhere': there is no such field",
    ),
    "another number of rows": (("data", "chunks"), [[20, 2]], r"data is of \(60, 2\) rows"),
    "moments without acceleration": (
        ("fit", "current", "moments"),
        lambda run: run["chunks"],
        "needs acceleration",
    ),
}


def lie(file, what):
    content = holder = manifest_of(file)
    *places, last = IMPOSSIBLE[what][0]
    for place in places:
        holder = holder[place]
    value = IMPOSSIBLE[what][1]
    holder[last] = value(holder) if callable(value) else value
    file.write_bytes(digested_document(content))


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_commit_that_says_what_cannot_be_is_passed_over_and_refused_where_it_is_the_only_one(run, what):
    whole, said = shutil.copytree(run, run.with_name("whole.zarr")), IMPOSSIBLE[what][2]
    lie(newest_commit(run), what)
    both = shutil.copytree(run, run.with_name("both.zarr"))
    with pytest.warns(UserWarning, match=rf"newer ones are damaged: .*{said}"):
        resumed = GaussianMixture.resume(run, lazy(), max_iter=6)
    assert np.array_equal(resumed.means_, resume(whole, lazy()).means_)
    for file in both.glob("commits/*/zarr.json"):
        lie(file, what)
    with pytest.raises(CheckpointCorruptError, match=rf"no commit is whole\. .*{said}"):
        resume(both, lazy())
