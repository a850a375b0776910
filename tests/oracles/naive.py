"""EM with a partial E-step, Algorithm 2 of the paper word for word.

The whole N × K matrix of responsibilities is kept and every sum is over all rows.
"""

from dataclasses import dataclass, field

import numpy as np

from oracles.linear import NotPositiveDefiniteError, inverse, log_normal
from oracles.policies import FullEM, Step


class SingularError(Exception):
    """A component has lost its weight or its covariance is not positive definite."""


@dataclass
class Theta:
    """Parameters; `covariances` always as K full matrices, whatever the covariance type."""

    weights: np.ndarray
    means: np.ndarray
    covariances: np.ndarray


@dataclass
class Run:
    """A whole run: `thetas[i]` is Θ_i (index 0 the start), `bounds[i−1]` F_i, `active[i−1]` the mask A_i."""

    covariance_type: str
    thetas: list = field(default_factory=list)
    bounds: list = field(default_factory=list)
    active: list = field(default_factory=list)
    responsibilities: np.ndarray | None = None
    stop_reason: str = "max-iter"

    @property
    def counts(self):
        return [int(mask.sum()) for mask in self.active]

    @property
    def weights(self):
        return self.thetas[-1].weights

    @property
    def means(self):
        return self.thetas[-1].means

    @property
    def covariances(self):
        """The last covariances in scikit-learn's shape for the covariance type."""
        return packed(self.thetas[-1].covariances, self.covariance_type)


def packed(full, covariance_type):
    """K full matrices of a structure → scikit-learn's shape for it."""
    return {
        "full": lambda: full,
        "tied": lambda: full[0],
        "diag": lambda: np.array([np.diag(matrix) for matrix in full]),
        "spherical": lambda: full[:, 0, 0],
        "tied_diag": lambda: np.diag(full[0]).copy(),
        "tied_spherical": lambda: np.asarray(full[0, 0, 0]),
    }[covariance_type]()


def unpacked(array, covariance_type, k, d):
    """scikit-learn's shape for a structure → K full matrices."""
    eye = np.eye(d, dtype=array.dtype)
    return {
        "full": lambda: array.copy(),
        "tied": lambda: np.array([array] * k),
        "diag": lambda: np.array([np.diag(row) for row in array]),
        "spherical": lambda: np.array([value * eye for value in array]),
        "tied_diag": lambda: np.array([np.diag(array)] * k),
        "tied_spherical": lambda: np.array([array * eye] * k),
    }[covariance_type]()


def restricted(scatters, counts, covariance_type):
    """The maximum likelihood covariances of a structure from the K full ones: K full matrices again."""
    k, d, _ = scatters.shape
    eye = np.eye(d, dtype=scatters.dtype)

    def tied():
        pooled = sum(count * matrix for count, matrix in zip(counts, scatters, strict=True)) / counts.sum()
        return np.array([pooled] * k)

    return {
        "full": lambda: scatters,
        "tied": tied,
        "diag": lambda: scatters * eye,
        "spherical": lambda: np.array([np.trace(matrix) / d * eye for matrix in scatters]),
        "tied_diag": lambda: tied() * eye,
        "tied_spherical": lambda: np.array([np.trace(matrix) / d * eye for matrix in tied()]),
    }[covariance_type]()


def log_joint(X, theta):
    """ln π_k + ln N(x_n | μ_k, Σ_k): N × K."""
    try:
        columns = [
            np.log(weight) + log_normal(X, mean, covariance)
            for weight, mean, covariance in zip(theta.weights, theta.means, theta.covariances, strict=True)
        ]
    except NotPositiveDefiniteError as error:
        raise SingularError(str(error)) from error
    return np.stack(columns, axis=1)


def log_likelihoods(X, theta):
    """ln p(x_n | Θ) for every row."""
    joint = log_joint(X, theta)
    top = joint.max(axis=1)
    return top + np.log(np.sum(np.exp(joint - top[:, None]), axis=1))


def e_step(X, theta):
    """Membership weights of the rows: N × K, by Bayes' theorem."""
    return np.exp(log_joint(X, theta) - log_likelihoods(X, theta)[:, None])


def free_energy(X, s, theta, q):
    """F(Θ, q) / Σ s_n: Neal and Hinton's lower bound, every row written out (0 ln 0 = 0)."""
    positive = q > 0
    q_log_q = np.where(positive, q * np.log(np.where(positive, q, 1)), 0)
    return np.sum(s[:, None] * (q * log_joint(X, theta) - q_log_q)) / np.sum(s)


def m_step(X, s, q, covariance_type, reg_covar):
    """Weighted maximum likelihood over all rows: means first, then scatters about them."""
    d = X.shape[1]
    held = s[:, None] * q
    counts = held.sum(axis=0)
    if not np.all(counts > 0):
        raise SingularError(f"component weights {counts}")
    means = (held.T @ X) / counts[:, None]
    scatters = np.array(
        [(held[:, [k]] * (X - means[k])).T @ (X - means[k]) / counts[k] for k in range(len(counts))]
    )
    scatters = (scatters + np.swapaxes(scatters, 1, 2)) / 2
    covariances = restricted(scatters, counts, covariance_type)
    covariances = covariances + X.dtype.type(reg_covar) * np.eye(d, dtype=X.dtype)
    return Theta(counts / np.sum(s), means, covariances)


def theta_of(start, covariance_type, dtype=np.float64):
    """Θ_0 from weights_init, means_init and precisions_init in scikit-learn's shapes."""
    means = np.asarray(start["means_init"]).astype(dtype)
    precisions = unpacked(np.asarray(start["precisions_init"]).astype(dtype), covariance_type, *means.shape)
    weights = np.asarray(start["weights_init"]).astype(dtype)
    return Theta(weights, means, np.array([inverse(matrix) for matrix in precisions]))


def fit(
    X,
    start,
    policy=None,
    *,
    covariance_type="full",
    max_iter=25,
    tol=0.0,
    reg_covar=0.0,
    sample_weight=None,
    chunks=None,
    dtype=np.float64,
):
    """Run Algorithm 2.

    `start` is a dictionary of `weights_init`, `means_init`, `precisions_init`, or an N × K array of
    responsibilities whose M-step is Θ_0. `chunks` are row counts, for EM*'s heaps per chunk. All arithmetic
    is in `dtype`.
    """
    X = np.asarray(X).astype(dtype)
    n = len(X)
    s = np.ones(n, dtype=dtype) if sample_weight is None else np.asarray(sample_weight).astype(dtype)
    policy = FullEM() if policy is None else policy
    policy.begin(n)
    chunk_of = np.zeros(n, dtype=int) if chunks is None else np.repeat(np.arange(len(chunks)), chunks)
    present = s > 0

    theta = (
        theta_of(start, covariance_type, dtype)
        if isinstance(start, dict)
        else m_step(X, s, np.asarray(start).astype(dtype), covariance_type, reg_covar)
    )
    q = np.zeros((n, len(theta.weights)), dtype=dtype)
    run = Run(covariance_type, thetas=[theta])
    active = present.copy()
    previous = None
    for i in range(1, max_iter + 1):
        if active.any():
            q[active] = e_step(X[active], theta)  # the others keep what they had
        bound = free_energy(X, s, theta, q)
        theta = m_step(X, s, q, covariance_type, reg_covar)
        run.thetas.append(theta)
        run.bounds.append(bound)
        run.active.append(active)
        run.responsibilities = q
        change = np.inf if previous is None else bound - previous
        step = Step(i, q, active, present, change, tol, chunk_of)
        if abs(change) < tol and policy.tests_tol(step):
            run.stop_reason = "tol"
            break
        active = policy.next_active(step)
        if active is None:
            run.stop_reason = "no-active-rows"
            break
        previous = bound
    return run
