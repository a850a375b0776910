"""What children of a `Zygote` do to the place of a saved model."""

import hashlib

import numpy as np

from emtau_dask import EmtauError, GaussianMixture
from reliability.boundaries import Boundaries

_random = np.random.default_rng(5)
MODEL = GaussianMixture(2, random_state=0, tol=1e-3).fit(_random.normal(size=(60, 2)))


def save(path, at=None):
    """Return the classes of the error (none where it was saved), what it says, and the steps that it took."""
    boundaries = Boundaries(at).install()
    try:
        MODEL.save(path)
    except EmtauError as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error), boundaries.count
    return [], "", boundaries.count


def bits(model):
    """Return a digest of a model's parameters."""
    arrays = (model.weights_, model.means_, model.covariances_, model.precisions_cholesky_)
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
