"""Saved models."""

import hashlib
import json
import shutil

import numpy as np
import zarr

from emtau_dask import EMStar, EMTau, GaussianMixture
from emtau_dask.mixture.covariance_types import STRUCTURES
from emtau_dask.policies.registry import ALGORITHMS
from reliability.fuzz import documents, zarrs
from reliability.fuzz.oracle import WrongError

ROWS = np.random.default_rng(4).normal(size=(60, 2)) + np.repeat([[-3.0], [3.0]], 30, axis=0)
ATTRIBUTES = {
    "format": ["emtau-model", "emtau-labels", "emtau-run"],
    "version": [1, 0, 2, 3, 4, "4", True, 4.0],
    "covariance_type": ["full", "tied", "diag", "spherical", "Full", None, ["full"]],
    "name": ["em", "em-tau", "em-star", "em-lazy", "os.system", "__class__"],
    "params": [
        {},
        {"tau": 10**30},
        {"tau": -1},
        {"revisit": None},
        {"__class__": 1},
        {"tail": "x"},
        {"a__b": 1},
        [1],
    ],
    "settings": [{}, None, {"checkpoint": "/tmp/elsewhere"}, {"n_components": 3}, {"self": 1}, {"cls": 1}],
    "n_components": [1, 3, 0, 2**40, None],
    "algorithm": [None, {}, {"name": "em", "params": {}}, "em", {"name": "em", "kind": "", "params": None}],
    "stop_reason": ["tol", "max-iter", "no-active-rows", "", None, 5, "\x1b[31m", ["tol"]],
    "feature_names": [
        None,
        [],
        ["a"],
        ["a", "b"],
        ["a", "a"],
        ["a", "b", "c"],
        "ab",
        [1, 2],
        [None, None],
        [["a"], "b"],
    ],
    "tol": [0, -1, 1e999, "auto", None, True],
    "reg_covar": [0, -1, "x", None],
    "max_iter": [0, -1, 2**70, 1.5, "x", None],
    "n_init": [0, 2**40, -1, "auto", None],
    "init_params": ["kmeans", "k-means++", "evil", None, []],
    "warm_start": [True, False, 1, "yes", None],
    "sha256": ["", "0" * 64, None, 5],
    "history": [None, {}, [], {"iteration": [1]}],
    "gap": [[], [None], ["nan"], None],
    "iteration": [[], [1], [1, 2], [2, 1, 3, 4], ["1"], [1.0], None],
    "rows": [[0, 0, 0, 0], [-1], [2**60], 5],
    "seconds": [[0.5], [1e999], [None], "now"],
}
AS_GOOD = {
    "tol": [0, 0.5, 1, "auto", "statistical"],
    "reg_covar": [0, 1e-6, 2],
    "max_iter": [0, 1, 10**6],
    "n_init": [1, 3, "auto"],
    "init_params": ["kmeans", "k-means++", "random", "random_from_data"],
    "warm_start": [True, False],
    "acceleration": ["auto", "quasi-newton", None],
    "missing": ["raise", "drop", "marginalise", "marginalize"],
    "random_state": [None, 0, 2**32 - 1],
    "stop_reason": ["tol", "max-iter", "no-active-rows"],
    "feature_names": [None, ["b", ""], ["\x1b[31m", "\u202e"]],
    "algorithm": [
        None,
        "auto",
        "em-tau",
        {"name": "em-tau", "kind": "EMTau", "params": {"tau": 2, "revisit": None}},
    ],
    "title": ["what others note beside a model"],
}
"""What a model that was saved may say in place of what it says."""
NAMES = ("weights", "means", "covariances", "precisions_cholesky")
VOCABULARY = {**zarrs.V3, **ATTRIBUTES}


def make(folder):
    """Write the originals."""
    for covariance_type in STRUCTURES:
        for name, algorithm in (("tau", EMTau(tau=3)), ("star", EMStar())):
            model = GaussianMixture(
                2, covariance_type=covariance_type, algorithm=algorithm, random_state=0, max_iter=4
            )
            model.fit(ROWS).save(folder / f"{covariance_type}-{name}")


def mutate(case):
    """Write a mutated copy; return what was done."""
    shutil.copytree(case.original, case.place)
    chance, how = case.chance, case.chance.random()
    root = case.place / "zarr.json"
    if how < 0.15:
        return documents.rewritten(chance, root, VOCABULARY, lambda content: _as_good(chance, content))
    if how < 0.25:
        return documents.rewritten(chance, root, VOCABULARY)
    if how < 0.45:
        return documents.rewritten(chance, root, VOCABULARY, lambda content: _attributes(chance, content))
    if how < 0.7:
        return _lie(chance, case.place)
    return zarrs.altered(chance, case.place)


def _attributes(chance, content):
    content["attributes"], what = documents.altered(chance, content["attributes"], ATTRIBUTES)
    return content, what


def _as_good(chance, content):
    name = chance.choice(sorted(AS_GOOD))
    attributes = content["attributes"]
    holder = attributes["settings"] if name in attributes["settings"] else attributes
    holder[name] = chance.choice(AS_GOOD[name])
    return content, f"{name} = {holder[name]!r}"


def _arrays(folder):
    """Return the arrays that are stored, by name, as zarr reads each."""
    found = {}
    for name in NAMES:
        zarrs.plainly(folder / name / "zarr.json")
        found[name] = np.asarray(zarr.open_array(folder / name, mode="r", zarr_format=3)[...])
    return found


def digest(arrays, history):
    """As the format has it: names, dtypes, shapes and values, in the order of names; and the history."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}\n".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    digest.update(json.dumps(history, sort_keys=True, separators=(",", ":")).encode())
    return digest.hexdigest()


def _lie(chance, folder):
    """Alter arrays, and write the digest that fits them."""
    arrays = _arrays(folder)
    notes = []
    for _ in range(chance.choice([1, 1, 2])):
        name = chance.choice(sorted(arrays))
        arrays[name], how = _other(chance, arrays[name])
        shutil.rmtree(folder / name)
        zarr.create_array(
            folder / name, data=arrays[name], chunks=tuple(max(1, size) for size in arrays[name].shape)
        )
        notes.append(f"{name} {how}")
    root = folder / "zarr.json"
    content = json.loads(root.read_bytes())
    content["attributes"]["sha256"] = digest(_arrays(folder), content["attributes"]["history"])
    content.pop("consolidated_metadata", None)
    root.write_text(json.dumps(content))
    return f"lies: {'; '.join(notes)}"


def _other(chance, values):
    how = chance.choice(["value", "value", "shape", "dtype", "all", "longer", "shorter"])
    values = np.atleast_1d(values).copy() if how in ("shape", "longer", "shorter") else values.copy()
    strange = [0.0, -1.0, 1e-320, 1e308, -1e308, np.nan, np.inf, 1.0, 1e-8, 2.0**40]
    with np.errstate(all="ignore"):
        if how == "value" and values.size:
            values.reshape(-1)[chance.randrange(values.size)] = np.asarray(chance.choice(strange)).astype(
                values.dtype
            )
        elif how == "all":
            values = np.full_like(values, np.asarray(chance.choice(strange)).astype(values.dtype))
        elif how == "shape":
            values = chance.choice(
                [values.reshape(-1), values[None], values[..., None], values[..., :1], values[:0]]
            )
        elif how == "dtype":
            values = values.astype(chance.choice(["f4", "i8", "i1", "c16", "b1", "U4", "f2", ">f8"]))
        elif how == "longer":
            values = np.concatenate([values, values])
        else:
            values = values[:1]
    return np.ascontiguousarray(
        values
    ), f"{how}: {values.dtype} {values.shape} {repr(values.reshape(-1)[:2].tolist())[:60]}"


def target(case):
    """Load; what was loaded is what the arrays are, can be used, and is written and read again as it is."""
    model = GaussianMixture.load(case.place)
    arrays = _arrays(case.place)
    for name in NAMES:
        if not np.array_equal(getattr(model, f"{name}_"), arrays[name], equal_nan=True):
            raise WrongError(f"{name}_ is not what its array holds")
    _check_said(model, json.loads((case.place / "zarr.json").read_bytes())["attributes"])
    check_usable(model)
    return "right"


def _check_said(model, attributes):
    """Raise `WrongError` where a model is not what its root document says."""
    found = {name: getattr(model, name) for name in attributes["settings"]}
    found["algorithm"] = _of_algorithm(model.algorithm)
    names = getattr(model, "feature_names_in_", None)
    found |= {"stop_reason": model.stop_reason_, "names": None if names is None else names.tolist()}
    said = attributes["settings"] | {
        "algorithm": _of_algorithm(attributes["settings"]["algorithm"]),
        "stop_reason": attributes["stop_reason"],
        "names": attributes["feature_names"],
    }
    if repr(found) != repr(said):
        raise WrongError(f"it says {said}, and was loaded as {found}")


def _of_algorithm(found):
    """Return an algorithm, as a model has it or its document, by name and parameters."""
    if found is None or isinstance(found, str):
        return found or "auto"
    if isinstance(found, dict):
        return found["name"], sorted(found["params"].items())
    name = next(name for name, kind in ALGORITHMS.items() if type(found) is kind)
    return name, sorted(found.get_params().items())


def check_usable(model):
    """Raise `WrongError` where a loaded mixture is none."""
    d = model.n_features_in_
    weights, means = model.weights_, model.means_
    if not (np.all(np.isfinite(means)) and np.all(weights >= 0) and abs(weights.sum() - 1) < 1e-6):
        raise WrongError(f"it was loaded, but its weights are {weights} and its means {means[:2]}")
    X = np.resize(ROWS, (10, d))
    responsibilities = model.predict_proba(X)
    if responsibilities.shape != (10, len(weights)) or not np.allclose(responsibilities.sum(axis=1), 1):
        raise WrongError(f"its responsibilities are {responsibilities[:2]}")
    model.score_samples(X)
    model.sample(2)
    if not repr(model) or model.history_.work < 0:
        raise WrongError(f"its history is {model.history_}")
