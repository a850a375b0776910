"""The estimator that a run config describes, and the responsibilities that it starts from."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from emtau_dask.config import RunConfig, algorithm_of
from emtau_dask.errors import ConfigError
from emtau_dask.estimator import GaussianMixture
from emtau_dask.fit import check_missing
from emtau_dask.policies import EMSampled

MAX_START_BYTES = 2**30


def estimator_of(config: RunConfig) -> GaussianMixture:
    """Return the estimator of a run, not fitted."""
    model, stop = config.model, config.stop
    return GaussianMixture(
        model.n_components,
        covariance_type=model.covariance_type,
        algorithm=algorithm_of(config.algorithm),
        acceleration=config.algorithm.acceleration,
        tol=stop.tol,
        reg_covar=model.reg_covar,
        max_iter=stop.max_iter,
        n_init=model.n_init,
        init_params=model.init_params,
        random_state=model.random_state,
        missing=model.missing,
        checkpoint=config.checkpoint.path,
        checkpoint_every=config.checkpoint.every,
    )


def check_fittable(config: RunConfig) -> None:
    """Raise `ConfigError` where the algorithm of a run cannot fit rows with missing values, and is to."""
    policy, acceleration = algorithm_of(config.algorithm), config.algorithm.acceleration
    policy = EMSampled() if isinstance(policy, str) else policy
    given = config.model.init is not None
    check_missing(config.model.missing, policy, acceleration, responsibilities=given)


def starting_responsibilities(config: RunConfig, rows: int) -> NDArray[np.float64] | None:
    """Return the responsibilities that `model.init` starts from, shape (rows, K), or None.

    Raises
    ------
    ConfigError
        They would take more than 1 GiB.
    """
    if config.model.init is None:
        return None
    k, seed = config.model.n_components, config.model.init.dirichlet_seed
    if rows * k * 8 > MAX_START_BYTES:
        raise ConfigError(
            f"model.init.dirichlet_seed = {seed} needs {rows:,} × {k} responsibilities in memory, more than "
            f"{MAX_START_BYTES // 2**30} GiB; use model.init_params for data of this size"
        )
    return np.random.default_rng(seed).dirichlet(np.ones(k), rows)
