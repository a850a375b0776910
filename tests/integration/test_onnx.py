"""A model that goes to ONNX by way of scikit-learn says there what it says here."""

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
from oracles import starts
from references import COVARIANCE_TYPES
from skl2onnx import to_onnx

from emtau_dask import GaussianMixture

ROWS, _ = starts.mixture(300, 3, 3, separation=3.0, seed=5)
PRECISIONS = {"float64": 1e-9, "float32": 1e-4}
"""Of the numbers in ONNX: how far responsibilities and log-likelihoods may be off."""


def exported(model, rows):
    """Labels, responsibilities and log-likelihoods of rows by onnxruntime, in the precision of the rows."""
    twin = model.to_sklearn()
    converted = to_onnx(twin, rows[:1], options={id(twin): {"score_samples": True}})
    session = onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    labels, responsibilities, scores = session.run(None, {session.get_inputs()[0].name: rows})
    return labels.ravel(), responsibilities, scores.ravel()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("n_components", [1, 3])
@pytest.mark.parametrize("covariance_type", COVARIANCE_TYPES)
def test_the_exported_model_agrees_with_scikit_learn_and_ours(covariance_type, n_components, precision):
    model = GaussianMixture(n_components, covariance_type=covariance_type, tol=1e-3, random_state=0).fit(ROWS)
    rows, atol = ROWS.astype(precision), PRECISIONS[precision]
    labels, responsibilities, scores = exported(model, rows)
    for reference in (model.to_sklearn(), model):
        expected = reference.predict_proba(rows.astype(float))
        assert np.allclose(responsibilities, expected, rtol=0, atol=atol)
        assert np.allclose(scores, reference.score_samples(rows.astype(float)), rtol=0, atol=atol)
        largest, second = np.sort(expected, axis=1)[:, [-1, -min(2, n_components)]].T
        clear = (largest - second > 10 * atol) | (n_components == 1)
        assert clear.mean() > 0.99
        assert np.array_equal(labels[clear], reference.predict(rows.astype(float))[clear])


@pytest.mark.parametrize(
    "names",
    [
        ("a b", "π/2", "c:d"),
        ("x\ny", "\x1b[31mred", ""),
        ("X", "label", "probabilities"),
        ("'); DROP TABLE", "\u202egnp.exe", "../../etc/passwd"),
    ],
)
def test_names_of_features_do_not_reach_the_exported_model(names):
    """It has one input of one name, so that no name has to be a legal one in ONNX."""
    frame = pd.DataFrame(ROWS, columns=names)
    model = GaussianMixture(2, tol=1e-3, random_state=0).fit(frame)
    twin = model.to_sklearn()
    assert list(twin.feature_names_in_) == list(model.feature_names_in_) == list(names)
    converted = to_onnx(twin, ROWS[:1], options={id(twin): {"score_samples": True}})
    onnx.checker.check_model(converted, full_check=True)
    assert [given.name for given in converted.graph.input] == ["X"]
    written = converted.SerializeToString()
    assert not [name for name in set(names) - {"X", "label", "probabilities", ""} if name.encode() in written]
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    _, _, scores = session.run(None, {"X": ROWS})
    assert np.allclose(scores.ravel(), model.score_samples(frame), rtol=0, atol=1e-9)
