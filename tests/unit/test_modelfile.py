"""Saved models: the same bits come back, nothing is overwritten, and damage is refused by name."""

import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from references import COVARIANCE_TYPES
from reliability.fuzz.models import NAMES, digest
from tiers import exhaustive_but

from emtau_dask import EMLazy, EMStar, EMTau, FullEM, GaussianMixture, InvalidDataError
from emtau_dask.policies.policy import NextPass, Schedule

ARRAYS = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_")
X = np.random.default_rng(0).normal(size=(60, 3)) + np.repeat([0, 4, 9], 20)[:, None]


def fitted(**settings):
    return GaussianMixture(3, random_state=0, tol=1e-3, **settings).fit(X)


@pytest.fixture(scope="module")
def model():
    return fitted()


@pytest.fixture
def saved(model, tmp_path):
    path = tmp_path / "model.zarr"
    model.save(path)
    return path


@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_every_array_comes_back_bit_for_bit(covariance_type, tmp_path):
    before = fitted(covariance_type=covariance_type)
    before.save(tmp_path / "model.zarr")
    after = GaussianMixture.load(tmp_path / "model.zarr")
    for name in ARRAYS:
        a, b = getattr(before, name), getattr(after, name)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


@pytest.mark.filterwarnings("ignore:X does not have valid feature names")
def test_how_the_fit_went_comes_back_and_predictions_are_the_same(tmp_path):
    model = fitted()
    model.feature_names_in_ = np.array(["a", "b", "c"], dtype=object)
    model.save(tmp_path / "model.zarr")
    loaded = GaussianMixture.load(tmp_path / "model.zarr")
    names = ("history_", "lower_bounds_", "lower_bound_", "n_iter_", "stop_reason_", "converged_")
    for name in (*names, "n_features_in_"):
        assert getattr(loaded, name) == getattr(model, name), name
    assert loaded.feature_names_in_.tolist() == ["a", "b", "c"]
    assert np.array_equal(loaded.predict_proba(X), model.predict_proba(X))
    assert loaded.fit(X).converged_


def test_settings_come_back(tmp_path):
    settings = {"covariance_type": "tied", "tol": 0.5, "reg_covar": 0.25, "max_iter": 77, "n_init": 2}
    settings |= {"init_params": "random_from_data", "warm_start": True}
    GaussianMixture(3, random_state=0).set_params(**settings).fit(X).save(tmp_path / "model.zarr")
    loaded = GaussianMixture.load(tmp_path / "model.zarr").get_params()
    assert {name: loaded[name] for name in settings} == settings


def test_a_fit_whose_gap_was_measured_comes_back(tmp_path):
    """The iteration that measured it scored the rows many times."""
    rng = np.random.default_rng(1)
    rows = np.repeat(rng.normal(size=(3, 2)), 1500, axis=0) + rng.normal(size=(4500, 2))
    before = GaussianMixture(3, random_state=1).fit(rows)
    assert max(record.active_rows for record in before.history_) > 3 * len(rows)
    before.save(tmp_path / "model.zarr")
    assert GaussianMixture.load(tmp_path / "model.zarr").history_ == before.history_


def test_settings_of_numpys_types_can_be_saved(tmp_path):
    settings = {"max_iter": np.int64(50), "tol": np.float32(0.5), "algorithm": EMTau(tau=np.int64(4))}
    GaussianMixture(np.int64(3), random_state=0, **settings).fit(X).save(tmp_path / "model.zarr")
    loaded = GaussianMixture.load(tmp_path / "model.zarr")
    assert (loaded.max_iter, loaded.tol, loaded.algorithm.tau) == (50, 0.5, 4)


@pytest.mark.parametrize(
    "algorithm",
    [FullEM(), EMTau(tau=3, revisit=None), EMStar(tail=0.5, every=2), EMLazy(threshold=0.5, full_every=3)],
    ids=repr,
)
def test_the_algorithm_comes_back(algorithm, tmp_path):
    fitted(algorithm=algorithm).save(tmp_path / "model.zarr")
    loaded = GaussianMixture.load(tmp_path / "model.zarr").algorithm
    assert (type(loaded), loaded.get_params()) == (type(algorithm), algorithm.get_params())


class Everything:
    """A user's own policy."""

    def row_arrays(self, n_components, max_iter):
        return None

    def update(self, state, evidence):
        return state, np.ones(len(evidence.labels), dtype=bool)

    def schedule(self, summary):
        return Schedule(NextPass.ALL, test_tol=True)


def test_a_model_of_a_users_own_policy_can_be_saved(tmp_path):
    own = fitted(algorithm=Everything())
    own.save(tmp_path / "model.zarr")
    with pytest.warns(UserWarning, match="policy of the user's own"):
        loaded = GaussianMixture.load(tmp_path / "model.zarr")
    assert np.array_equal(loaded.means_, own.means_)


def test_a_model_without_iterations_comes_back(tmp_path):
    fitted(max_iter=0).save(tmp_path / "model.zarr")
    loaded = GaussianMixture.load(tmp_path / "model.zarr")
    assert (loaded.n_iter_, loaded.lower_bound_) == (0, -np.inf)


def test_a_subclass_loads_as_itself(saved):
    class Mine(GaussianMixture):
        pass

    assert type(Mine.load(saved)) is Mine


def occupied_by_an_array(path):
    zarr.create_array(store=path, data=np.arange(3))


def occupied_by_a_file(path):
    path.write_text("mine")


def occupied_by_a_folder(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def contents(path):
    files = [path] if path.is_file() else [file for file in sorted(path.rglob("*")) if file.is_file()]
    return {file: file.read_bytes() for file in files}


@pytest.mark.parametrize("occupy", [occupied_by_an_array, occupied_by_a_file, occupied_by_a_folder])
def test_what_is_at_a_path_is_left_alone_also_where_models_may_be_replaced(model, tmp_path, occupy):
    path = tmp_path / "taken"
    occupy(path)
    before = contents(path)
    for overwrite, said in ((False, "taken"), (True, "not a model")):
        with pytest.raises(InvalidDataError, match=said):
            model.save(path, overwrite=overwrite)
        assert contents(path) == before


def test_a_model_is_replaced_on_request(saved):
    other, before = fitted(covariance_type="diag"), contents(saved)
    with pytest.raises(InvalidDataError, match=r"holds a model; .*overwrite=True"):
        other.save(saved)
    assert contents(saved) == before
    other.save(saved, overwrite=True)
    assert np.array_equal(GaussianMixture.load(saved).covariances_, other.covariances_)
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


@pytest.mark.parametrize("kept_in", [dict, zarr.storage.MemoryStore])
def test_a_model_in_memory_comes_back_and_is_replaced_on_request(model, kept_in):
    store, other = kept_in(), fitted(algorithm="em", max_iter=500)
    there = store if kept_in is not dict else zarr.storage.MemoryStore(store)
    model.save(store)
    assert np.array_equal(GaussianMixture.load(there).means_, model.means_)
    with pytest.raises(InvalidDataError, match=r"holds a model; .*overwrite=True"):
        other.save(store)
    other.save(store, overwrite=True)
    assert np.array_equal(GaussianMixture.load(there).means_, other.means_)


@pytest.mark.parametrize("random_state", [0, 2**31, np.int64(7), None])
def test_a_loaded_model_keeps_its_random_state(random_state, tmp_path):
    before = fitted().set_params(random_state=random_state)
    before.save(tmp_path / "model.zarr")
    after = GaussianMixture.load(tmp_path / "model.zarr")
    assert after.random_state == random_state
    if random_state is not None:
        assert np.array_equal(after.sample(5)[0], before.sample(5)[0])


def test_a_generator_is_not_stored(tmp_path):
    fitted().set_params(random_state=np.random.default_rng(0)).save(tmp_path / "model.zarr")
    assert GaussianMixture.load(tmp_path / "model.zarr").random_state is None


def of_document(change):
    """Edit the attributes of the document of a model."""

    def edit(path):
        file = path / "zarr.json"
        metadata = json.loads(file.read_text())
        change(metadata["attributes"])
        file.write_text(json.dumps(metadata))

    return edit


def edit_attributes(**changes):
    return of_document(lambda attributes: attributes.update(changes))


def of_settings(**changes):
    return of_document(lambda attributes: attributes["settings"].update(changes))


def without_attribute(name):
    return of_document(lambda attributes: attributes.pop(name))


def replace_array(name, values):
    def edit(path):
        shutil.rmtree(path / name)
        zarr.open_group(path, mode="r+").create_array(name, data=np.asarray(values))

    return edit


def chunk_of(path, name):
    return next(file for file in sorted((path / name / "c").rglob("*")) if file.is_file())


DAMAGE = {
    "format": edit_attributes(format="other-model"),
    "version": edit_attributes(version=99),
    "no format": without_attribute("format"),
    "no settings": without_attribute("settings"),
    "no stop reason": without_attribute("stop_reason"),
    "no feature names": without_attribute("feature_names"),
    "settings of another kind": edit_attributes(settings=3),
    "no such array": lambda path: shutil.rmtree(path / "means"),
    "no such history": without_attribute("history"),
    "another history": of_document(lambda attributes: attributes["history"]["seconds"].__setitem__(0, 0.5)),
    "array of another shape": replace_array("means", np.zeros((3, 2))),
    "complex array": replace_array("weights", np.full(3, 1 / 3 + 0j)),
    "weights of NaN": replace_array("weights", [np.nan, 0.5, 0.5]),
    "missing chunk": lambda path: chunk_of(path, "means").unlink(),
    "truncated chunk": lambda path: chunk_of(path, "means").write_bytes(b"\x01\x02"),
    "scrambled metadata": lambda path: (path / "means" / "zarr.json").write_text("{"),
    "scrambled root": lambda path: (path / "zarr.json").write_text("not json"),
    "group in the place of an array": lambda path: (
        shutil.rmtree(path / "means"),
        zarr.open_group(path, mode="r+").create_group("means"),
    ),
}


MISSING = {"no settings", "no such array", "no such history", "missing chunk"}
ALTERED = {"format", "version", "array of another shape", "weights of NaN", "scrambled root"}


@pytest.mark.parametrize("damage", exhaustive_but(MISSING | ALTERED, DAMAGE))
def test_a_damaged_model_is_refused(saved, damage):
    DAMAGE[damage](saved)
    with pytest.raises(InvalidDataError, match=r"model\.zarr"):
        GaussianMixture.load(saved)


POLICY = {"name": "em-tau", "kind": "EMTau", "params": {"tau": 3}}
WRONG = {
    "feature_names": [5, True, "abc", {"a": 1}, [], ["a"], ["a", "b", "a"], [1, 2, 3], ["a", None, "c"]],
    "stop_reason": ["\x1b[2Jx", "", "TOL", None, 5, ["tol"]],
    "algorithm": [
        "round",
        5,
        {},
        {"name": "em"},
        {"params": {}},
        POLICY | {"more": 1},
        POLICY | {"name": None},
    ],
    "name": [POLICY | {"name": "os.system"}, POLICY | {"name": ["em"]}],
    "params": [POLICY | {"params": None}, POLICY | {"params": [1]}],
    "x": [POLICY | {"params": {"x": 1}}],
    "tau": [POLICY | {"params": {"tau": -1}}, POLICY | {"params": {"tau": "3"}}],
    "sha256": [None, 5],
}
WRONG_SETTINGS = {
    "covariance_type": ["round", None, ["full"]],
    "tol": [-1, "tight", None, True],
    "reg_covar": [-1e-6, "x", None],
    "max_iter": [-1, 1.5, None, 2**70],
    "n_init": [0, 2**40, "many"],
    "init_params": ["evil", None, []],
    "warm_start": [1, "yes", None],
    "acceleration": ["warp", 1],
    "missing": ["leave", None],
    "random_state": [-1, 2**32, 1.5, "0", True],
    "checkpoint": ["/tmp/elsewhere"],
    "\x1b[2J": [0],
}
EDITS = [
    (name, edit_attributes(**{name: value}))
    for name in ("feature_names", "stop_reason", "sha256")
    for value in WRONG[name]
]
EDITS += [
    (name, of_settings(algorithm=value))
    for name in ("algorithm", "name", "params", "x", "tau")
    for value in WRONG[name]
]
EDITS += [(name, of_settings(**{name: value})) for name, values in WRONG_SETTINGS.items() for value in values]


ONE_OF_EACH = {field: (field, edit) for field, edit in reversed(EDITS)}.values()


@pytest.mark.parametrize(
    "wrong", exhaustive_but(ONE_OF_EACH, EDITS), ids=[f"{i}-{field!r}" for i, (field, _) in enumerate(EDITS)]
)
def test_a_wrong_field_is_refused_by_name_when_a_model_is_loaded(saved, wrong):
    field, edit = wrong
    edit(saved)
    with pytest.raises(
        InvalidDataError, match=r"model\.zarr is incomplete or damaged: .*Save it again"
    ) as caught:
        GaussianMixture.load(saved)
    said = str(caught.value)
    assert repr(field)[1:-1] in said
    assert said.isprintable()
    assert len(said) < 400 + len(str(saved))


ALLOWED = {
    "settings.tol is 'tight': it must be a finite number of at least 0 or one": of_settings(tol="tight"),
    "stop_reason is '\\x1b[2J': it must be one of 'tol', ": edit_attributes(stop_reason="\x1b[2J"),
    "feature_names is ['a']: it must be a list of 3 different names": edit_attributes(feature_names=["a"]),
    f"feature_names is '{'x' * 56}...: ": edit_attributes(feature_names="x" * 10**6),
    "settings.checkpoint is '/tmp': there is no such field": of_settings(checkpoint="/tmp"),
}


@pytest.mark.parametrize("words", ALLOWED)
def test_the_message_of_a_wrong_field_has_its_value_and_what_is_allowed(saved, words):
    ALLOWED[words](saved)
    with pytest.raises(InvalidDataError, match=re.escape(words)):
        GaussianMixture.load(saved)


def test_what_others_note_beside_a_model_is_let_be(saved, model):
    edit_attributes(title="mine", run="0" * 32)(saved)
    assert np.array_equal(GaussianMixture.load(saved).means_, model.means_)


@pytest.mark.parametrize("settings", [{"tol": "tight"}, {"max_iter": -1}, {"random_state": -1}], ids=str)
def test_what_could_not_be_loaded_is_not_saved(settings, tmp_path):
    name, value = next(iter(settings.items()))
    with pytest.raises(InvalidDataError, match=f"settings.{name} is {value!r}: it must be"):
        fitted().set_params(**settings).save(tmp_path / "model.zarr")
    assert list(tmp_path.iterdir()) == []


def lie(**values):
    """Replace arrays, and write the digest that fits."""

    def edit(path):
        for name, value in values.items():
            replace_array(name, value)(path)
        group = zarr.open_group(path, mode="r+", use_consolidated=False)
        group.attrs["sha256"] = digest({name: group[name][...] for name in NAMES}, group.attrs["history"])

    return edit


def altered(name, place, value):
    """Alter one value of an array of a model of three components, and write the digest that fits."""

    def edit(path):
        values = zarr.open_array(path / name, mode="r")[...]
        values[place] = value
        lie(**{name: values})(path)

    return edit


def of_history(change):
    """Edit the columns of a model's history, and write the digest that fits."""

    def edit(path):
        of_document(lambda attributes: change(attributes["history"]))(path)
        lie()(path)

    return edit


def first(**values):
    """Alter the first values of columns."""
    return of_history(lambda history: [history[name].__setitem__(0, value) for name, value in values.items()])


LIES = {
    "weights that sum to more": (altered("weights", 0, 5.0), "weights sum to"),
    "a negative weight": (lie(weights=[-0.5, 1.0, 0.5]), "weights"),
    "infinite means": (lie(means=np.full((3, 3), np.inf)), "means are not finite"),
    "weights that sum to nothing": (lie(weights=np.full(3, 1e-320)), "weights sum to"),
    "a mean of NaN": (altered("means", 0, np.nan), "means are not finite"),
    "an infinite covariance": (altered("covariances", 0, np.inf), "covariances are not finite"),
    "a negative factor": (altered("precisions_cholesky", 0, -1.0), "not finite"),
    "a factor beyond numbers": (altered("precisions_cholesky", 0, 1e300), "not finite"),
    "fewer rows than none": (first(rows=-1), "history.rows is -1: it must be an integer from 0"),
    "no rows": (first(rows=0), "impossible iteration"),
    "more active rows than rows": (first(active_rows=2**47), "impossible iteration"),
    "iterations in another order": (first(iteration=7), "impossible iteration"),
    "a bound that is no number": (
        first(lower_bound=None),
        "history.lower_bound is None: it must be a finite",
    ),
    "seconds in words": (first(seconds="nan"), "history.seconds is 'nan': it must be a finite number"),
    "columns of other lengths": (
        of_history(lambda each: each["seconds"].pop()),
        "columns of several lengths",
    ),
    "a column of lists": (first(rows=[60]), r"history.rows is \[60\]: it must be an integer"),
    "iterations in halves": (first(iteration=1.0), "history.iteration is 1.0: it must be an integer"),
    "flags in numbers": (first(accepted=1), "history.accepted is 1: it must be true or false"),
    "no column": (of_history(lambda history: history.pop("gap")), "history.gap is missing"),
    "whole means": (lie(means=np.ones((3, 3), np.int64)), "means is of int64; it must be of float64"),
    "means of one axis": (lie(means=np.ones(3)), "means has 1 axes; it must have 2"),
}


PARAMETERS = {"weights that sum to more", "a mean of NaN", "a negative factor", "means of one axis"}
HISTORY = {"no rows", "a bound that is no number", "columns of other lengths", "iterations in halves"}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("what", exhaustive_but(PARAMETERS | HISTORY, LIES))
def test_a_made_up_model_that_is_none_is_refused(saved, what):
    edit, said = LIES[what]
    edit(saved)
    with pytest.raises(InvalidDataError, match=said):
        GaussianMixture.load(saved)


def test_no_rows_are_drawn_of_a_covariance_that_is_none(saved):
    covariances = zarr.open_array(saved / "covariances", mode="r")[...]
    covariances[1] = -covariances[1]
    lie(covariances=covariances)(saved)
    with pytest.raises(InvalidDataError, match="the covariance of component 1 is not positive definite"):
        GaussianMixture.load(saved).sample(100)


def foreign_array(path):
    zarr.create_array(store=path, data=np.arange(3.0))


def foreign_group(path):
    zarr.create_group(store=path)


def foreign_file(path):
    path.write_bytes(b"\x80\x04N.")


FOREIGN = [lambda path: None, Path.mkdir, foreign_array, foreign_group, foreign_file]


@pytest.mark.parametrize("make", FOREIGN, ids=["nothing", "folder", "array", "group", "file"])
def test_what_is_no_model_is_refused(tmp_path, make):
    make(tmp_path / "other")
    with pytest.raises(InvalidDataError, match="other"):
        GaussianMixture.load(tmp_path / "other")


class Trap:
    def __reduce__(self):
        return Path.touch, (Path("sprung"),)


@pytest.mark.parametrize("place", ["compressor", "filters"])
def test_loading_runs_no_pickle(saved, tmp_path, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    codec = {"id": "pickle", "protocol": 5}
    metadata = {"zarr_format": 2, "shape": [3], "chunks": [3], "dtype": "<f8", "order": "C", "fill_value": 0}
    metadata |= {"compressor": codec if place == "compressor" else None}
    metadata |= {"filters": [codec] if place == "filters" else None}
    root = zarr.open_group(tmp_path / "trap.zarr", mode="w", zarr_format=2)
    root.attrs.update(dict(zarr.open_group(saved, mode="r").attrs))
    (tmp_path / "trap.zarr/weights").mkdir()
    (tmp_path / "trap.zarr/weights/.zarray").write_text(json.dumps(metadata))
    (tmp_path / "trap.zarr/weights/0").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InvalidDataError):
        GaussianMixture.load(tmp_path / "trap.zarr")
    assert not Path("sprung").exists()


def test_a_model_that_is_not_fitted_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="not fitted"):
        GaussianMixture().save(tmp_path / "model.zarr")
