"""Writes models, checkpoints and a selection for the version that runs it, as later versions must read them.

    python tests/golden/write.py          # once for each release: tests/golden/VERSION.zip

The rows are 1,500 of three Gaussians in three features, rounded to three decimals. Fits with a checkpoint are
stopped in their third iteration, so that a later version has to resume them.
"""

import json
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np

import emtau_dask
from emtau_dask import EMStar, EMTau, FullEM, GaussianMixture, select_components

COVARIANCE_TYPES = ("full", "tied", "diag", "spherical")
POLICIES = {"em": FullEM(), "em-tau": EMTau(tau=3), "em-star": EMStar(every=2)}
HERE = Path(__file__).parent


def rows():
    """The rows (1,500, 3), and the means from which all fits begin (3, 3)."""
    rng = np.random.default_rng(0)
    means = np.array([[0.0, 0.0, 0.0], [3.0, 1.0, 0.0], [0.0, 4.0, -2.0]])
    values = np.concatenate([mean + rng.normal(size=(500, 3)) for mean in means])
    return np.round(rng.permutation(values), 3), means + 0.5


def start(means):
    return {
        "weights_init": np.full(3, 1 / 3),
        "means_init": means,
        "precisions_init": np.tile(np.eye(3), (3, 1, 1)),
    }


def write(folder):
    X, means = rows()
    np.save(folder / "rows.npy", X)
    (folder / "version.json").write_text(json.dumps(emtau_dask.__version__))
    for covariance_type in COVARIANCE_TYPES:
        model = GaussianMixture(
            3,
            algorithm="em",
            covariance_type=covariance_type,
            tol=1e-10,
            max_iter=500,
            means_init=means,
            random_state=0,
        )
        model.fit(X).save(folder / f"model-{covariance_type}.zarr")
    for name, policy in POLICIES.items():
        GaussianMixture(
            3,
            algorithm=policy,
            tol=0,
            max_iter=3,
            reg_covar=0,
            checkpoint=str(folder / f"run-{name}.zarr"),
            **start(means),
        ).fit(X)
    GaussianMixture(3, random_state=0, checkpoint=str(folder / "run-default.zarr")).fit(X)
    settings = GaussianMixture(algorithm="em", tol=1e-8, max_iter=500)
    select_components(
        X,
        range(2, 5),
        criterion="bic",
        random_state=0,
        estimator=settings,
        checkpoint=str(folder / "selection.zarr"),
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as temporary:
        write(Path(temporary))
        shutil.make_archive(str(HERE / emtau_dask.__version__), "zip", temporary)
