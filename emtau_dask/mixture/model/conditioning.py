"""The mixture of some features, and that of the rest where these are known.

Bishop 2006, "Pattern Recognition and Machine Learning": section 2.3.1 for a component, and eq. 2.81 and 2.82
for its conditional mean and covariance. The weights of the conditional mixture are the responsibilities under
the mixture of the given features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from emtau_dask.mixture.covariance import Split
from emtau_dask.mixture.model.parameters import MixtureParameters
from emtau_dask.mixture.model.statistics import SufficientStatistics
from emtau_dask.mixture.numerics import Floats, Ints, read_only, read_only_copy


@dataclass(frozen=True, eq=False)
class Conditioning:
    """A mixture, split into given features and the rest.

    Attributes
    ----------
    parameters : MixtureParameters
        Of all d features.
    given : ndarray of shape (g,)
        The numbers of the given features, in the order in which their values come.
    """

    parameters: MixtureParameters
    given: Ints

    @cached_property
    def rest(self) -> Ints:
        """The numbers of the other features, ascending, (r,)."""
        return np.setdiff1d(np.arange(self.parameters.n_features), self.given)

    @cached_property
    def _split(self) -> Split:
        known = self.parameters
        return known.structure.split(known.covariances, known.precisions_cholesky, self.given, self.rest)

    @property
    def marginal(self) -> MixtureParameters:
        """The mixture of the given features alone."""
        return MixtureParameters(
            self.parameters.covariance_type,
            self.parameters.weights,
            read_only_copy(self.parameters.means[:, self.given]),
            read_only_copy(self._split.given_covariances),
            read_only_copy(self._split.given_factors),
        )

    def component_means(self, rows: Floats, k: int) -> Floats:
        """Return component k's means of the rest where the given features are ``rows`` (n, g); (n, r)."""
        means, coefficients = self.parameters.means[k], self._split.coefficients
        if coefficients is None:
            return np.broadcast_to(means[self.rest], (len(rows), len(self.rest)))
        own = coefficients[k if len(coefficients) > 1 else 0]
        shifted: Floats = (rows - means[self.given]) @ own.T
        shifted += means[self.rest]
        return shifted

    def means(self, rows: Floats, responsibilities: Floats) -> Floats:
        """Return the expected values of the rest where the given features are ``rows`` (n, g), (n, r).

        Responsibilities (K, n) are those of the rows under `marginal`.
        """
        found = np.zeros((len(rows), len(self.rest)))
        for k, own in enumerate(responsibilities):
            found += own[:, np.newaxis] * self.component_means(rows, k)
        return found

    @cached_property
    def _unexplained(self) -> Floats:
        """Vectors (r, K, d), whose outer products sum to the covariances of the rest."""
        K, d, r = self.parameters.n_components, self.parameters.n_features, len(self.rest)
        vectors = np.zeros((r, K, d))
        draw, covariances = self.parameters.structure.draw, self._split.rest_covariances
        for k in range(K):
            vectors[:, k, self.rest] = draw(np.eye(r), covariances, k)
        return vectors

    def statistics(self, rows: Floats, responsibilities: Floats) -> SufficientStatistics:
        """Return the expected statistics of all features where the given ones, ``rows`` (n, g), are known.

        Responsibilities (K, n) may be times weights of rows. With x̂ the rows completed by `component_means`,
        the scatter of component k is that of x̂ and ``Σ_n r_kn C_k``, C the covariance of the rest where the
        given features are known (Ghahramani and Jordan 1994, "Supervised learning from incomplete data via an
        EM approach", section 3).
        """
        structure, n = self.parameters.structure, len(rows)
        K, d = self.parameters.means.shape
        weights = responsibilities.sum(axis=1)
        means, scatter = np.zeros((K, d)), np.zeros(structure.shape(K, d))
        completed = np.empty((n, d))
        completed[:, self.given] = rows
        for k in range(K):
            if not weights[k] > 0:
                continue
            completed[:, self.rest] = self.component_means(rows, k)
            centre = self.parameters.means[k]
            means[k] = centre + (responsibilities[k] / weights[k]) @ (completed - centre)
            roots = np.sqrt(responsibilities[k])[:, np.newaxis] * (completed - means[k])
            structure.sum_scatter(scatter, k, iter([roots]))
        structure.add_outer(scatter, np.tile(weights, (len(self.rest), 1)), self._unexplained)
        return SufficientStatistics(read_only(weights), read_only(means), read_only(scatter))

    def at(self, row: Floats, responsibilities: Floats) -> MixtureParameters:
        """Return the mixture of the rest where the given features are ``row`` (g,).

        Its weights are the responsibilities (K,) of the row under `marginal`; one that is 0 in float64
        becomes the smallest normal number, since weights are above 0.
        """
        K = self.parameters.n_components
        weights = np.maximum(responsibilities, np.finfo(np.float64).tiny)
        means = np.concatenate([self.component_means(row[np.newaxis], k) for k in range(K)])
        return MixtureParameters(
            self.parameters.covariance_type,
            read_only(weights / weights.sum()),
            read_only(means),
            read_only_copy(self._split.rest_covariances),
            read_only_copy(self._split.rest_factors),
        )
