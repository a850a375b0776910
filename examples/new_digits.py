"""Learn the density of handwritten digits, and draw digits that nobody wrote.

python examples/new_digits.py                 # the 1,797 digits that come with scikit-learn
python examples/new_digits.py 1797 digits.png
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

from emtau_dask import GaussianMixture

SIDE, FEATURES, COMPONENTS = 8, 24, 20


def main(rows: int = 1797) -> np.ndarray[Any, Any]:
    """Fit the digits in their principal components, and return images drawn from the mixture."""
    images = load_digits().data[:rows]
    projection = PCA(FEATURES, random_state=0).fit(images)
    mixture = GaussianMixture(COMPONENTS, covariance_type="tied", random_state=0)
    mixture.fit(projection.transform(images))
    print(
        f"{mixture.stop_reason_}: log-likelihood {mixture.lower_bound_:.3f} per row, {COMPONENTS} components"
    )
    drawn, components = mixture.sample(60)
    print(f"{len(drawn)} images drawn, of {len(np.unique(components))} components")
    return projection.inverse_transform(drawn).reshape(-1, SIDE, SIDE)


def picture(images: np.ndarray[Any, Any]) -> Any:
    """Draw the images in the order of their components, twelve in a row."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(5, 12, figsize=(6.4, 2.7), layout="constrained")
    for place, image in zip(axes.flat, images, strict=True):
        place.imshow(image, cmap="gray_r", vmin=0, vmax=16)
        place.axis("off")
    return figure


if __name__ == "__main__":
    made = main(*map(int, sys.argv[1:2]))
    if len(sys.argv) > 2:
        picture(made).savefig(sys.argv[2])
