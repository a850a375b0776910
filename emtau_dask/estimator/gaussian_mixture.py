"""`GaussianMixture`: the estimator that users of scikit-learn and dask expect."""

from __future__ import annotations

from typing import Any, Literal, Self

from sklearn.exceptions import ConvergenceWarning

from emtau_dask.em.settings import DEFAULT_TOL
from emtau_dask.errors import warn_user
from emtau_dask.estimator.conditioning import ConditionedMixture
from emtau_dask.estimator.fitting import fit_estimator, not_converged_text
from emtau_dask.estimator.inputs import FeatureChoice
from emtau_dask.estimator.resuming import open_saved, resume_estimator, saved_estimator
from emtau_dask.policies.policy import ActivityPolicy
from emtau_dask.policies.registry import ALGORITHMS, as_policy

FAR, GOOD_GAP = 100.0, 1e-9
"""A fit that stops by tol warns if its gap is above FAR * tol and above GOOD_GAP (nats per row)."""


class GaussianMixture(ConditionedMixture):
    """Gaussian mixture fitted by EM, on data of any size.

    Parameters
    ----------
    n_components : int, default=1
        Number of components K.
    covariance_type : {"full", "tied", "diag", "spherical", "tied_diag", "tied_spherical"}, default="full"
        Shape of the covariances; the first four are scikit-learn's. With ``"tied_diag"`` all components share
        one variance for each feature, with ``"tied_spherical"`` they share a single variance (mclust's models
        EEI and EII).
    algorithm : {"auto", "em", "em-tau", "em-star", "em-lazy", "em-sampled"} or policy, default="auto"
        Which rows each E-step scores. A name, for the policy's defaults, or an
        object: `FullEM`, `EMTau`, `EMStar`, `EMLazy`, `EMSampled`, or one of your own with the
        methods of `emtau_dask.policies.ActivityPolicy`. ``"auto"`` begins on samples if the data are
        large, and continues with `EMSampled` or `FullEM`: a fixed function of the numbers of rows, features
        and components and of the covariance type (see ``emtau_dask.em.settings``).
    tol : float, "auto" or "statistical", default="auto"
        When to stop. The fit stops when the log-likelihood per row changes by less than this (nats) from one
        full pass to the next. With 0 it never stops by tol. ``"statistical"`` stops when it could still gain
        (see ``gap_``) less than ``min(0.01 p/2N, 1/8N)`` for p free parameters and N rows: then sampling
        error is many times larger. ``"auto"`` is ``"statistical"`` for ``algorithm="auto"`` if there are at
        least 10 rows for each parameter, else 1e-5.
    reg_covar : float, default=1e-6
        Added to every variance.
    max_iter : int, default=500
        Maximum number of M-steps, whatever share of the rows was scored. At most half of them are on samples.
    n_init : int or "auto", default="auto"
        Number of starts. With ``algorithm="auto"`` they are compared on a small sample, or on all rows if
        these are few, and only the best continues; other algorithms continue all and keep the best.
        ``"auto"`` is 3 to 16 starts for ``algorithm="auto"``, by the shape of the data, and 1 for other
        algorithms, for one component, and for large data that have fewer rows than parameters. If all
        starting parameters are given there is one start.
    init_params : {"kmeans", "k-means++", "random", "random_from_data"}, default="kmeans"
        How the starts are computed. Each needs bounded memory, and gives the same start for the same seed
        under any chunking. ``"k-means++"`` and ``"random_from_data"`` assign every row to its nearest seed.
    weights_init : array-like of shape (n_components,), optional
        Starting weights: above 0, summing to 1.
    means_init : array-like of shape (n_components, n_features), optional
        Starting means.
    precisions_init : array-like, optional
        Starting inverse covariances: (K, d, d) full, (d, d) tied, (K, d) diag, (K,) spherical, (d,)
        tied_diag, () tied_spherical.
    random_state : int, RandomState, Generator or None
        Seed of all that is random; the same integer gives identical results.
    warm_start : bool, default=False
        Start from the parameters of the last fit, unless ``responsibilities_init``
        is given; ``n_init`` is then ignored.
    checkpoint : str, Path or zarr store, optional
        Where the fit is committed, for `resume`: a path or URL (``s3://``, ``gs://`` and other fsspec
        URLs). It must not hold a run yet.
    checkpoint_every : int, default=1
        Iterations (and passes of a k-means start) between commits.
    verbose : int, default=0
        Whether progress is printed to standard output: 1 for a line a stage, 2 also for one a start and an
        iteration.
    acceleration : {"auto", "quasi-newton"} or None, default="auto"
        Whether quasi-Newton steps replace those of EM between passes over all rows (and on samples). A step
        that lowers the log-likelihood is rejected. ``"auto"``: with ``algorithm="auto"`` and `EMSampled`.
    missing : {"raise", "drop", "marginalise", "marginalize"}, default="raise"
        What NaN means: an error; a row that is not used; or, in either spelling, a missing value, over which
        fits, predictions and scores integrate. With ``"drop"`` rows with NaN have the label -1, and NaN as
        responsibilities and log-likelihoods. Fits that integrate begin on sampled complete rows.

    Attributes
    ----------
    weights_ : ndarray of shape (n_components,), float64
    means_ : ndarray of shape (n_components, n_features), float64
    covariances_, precisions_, precisions_cholesky_ : ndarray, float64
        (K, d, d) full, (d, d) tied, (K, d) diag, (K,) spherical, (d,) tied_diag, () tied_spherical.
    stop_reason_ : {"tol", "no-active-rows", "max-iter"}
    converged_ : bool
        True iff ``stop_reason_`` is ``"tol"``. For ``EMTau(revisit=None)`` and
        `EMStar` that does not imply a stationary point of the log-likelihood:
        the parameters may stop because the rows froze.
    n_iter_ : int
    lower_bound_ : float
        Log-likelihood per (weighted) row in nats: EM's lower bound of it in the last accepted full pass,
        before the last M-step.
    lower_bounds_ : list of float
        The same of every iteration; those of samples and of sampled rows are estimates, see ``history_``.
    gap_ : float
        How much the fit could still gain: the estimated difference, in nats per row, between the
        log-likelihood at the stationary point to which it converges and that of the last full pass. It is
        local and of second order: half of the product of the gradient with a quasi-Newton step (the Newton
        decrement), whose curvature is learnt from the last steps. While full passes change little it is at
        least Aitken's extrapolation of the last ones. Before ``tol="statistical"`` ends a fit by it, 4 to 32
        further passes over the active rows, or over all, measure the curvature; if that shows a saddle, the
        fit continues. With another ``tol`` it may be far too small on a plateau. Without acceleration it is
        Aitken's extrapolation of the last three bounds. NaN if there is no estimate.
    history_ : FitHistory
        One `IterationRecord` for each iteration. ``history_.work`` is the number of scored rows, in passes
        over the data.
    n_features_in_ : int
    feature_names_in_ : ndarray of shape (n_features,)
        Set only if the data name their features.

    References
    ----------
    Fajardo and Liang, "On the EM-Tau Algorithm: a new EM style algorithm with
    partial E-steps". Neal and Hinton 1998, "A view of the EM algorithm that
    justifies incremental, sparse, and other variants".

    Examples
    --------
    >>> import dask.array as da
    >>> from emtau_dask import EMTau, GaussianMixture
    >>> X = da.random.default_rng(0).normal(size=(1000, 2), chunks=(250, 2))
    >>> gm = GaussianMixture(2, algorithm=EMTau(tau=20), random_state=0).fit(X)
    >>> gm.means_.shape
    (2, 2)
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        covariance_type: Literal["full", "tied", "diag", "spherical", "tied_diag", "tied_spherical"] = "full",
        algorithm: Literal["auto", "em", "em-tau", "em-star", "em-lazy", "em-sampled"]
        | ActivityPolicy = "auto",
        tol: float | Literal["auto", "statistical"] = "auto",
        reg_covar: float = 1e-6,
        max_iter: int = 500,
        n_init: int | Literal["auto"] = "auto",
        init_params: Literal["kmeans", "k-means++", "random", "random_from_data"] = "kmeans",
        weights_init: Any = None,
        means_init: Any = None,
        precisions_init: Any = None,
        random_state: Any = None,
        warm_start: bool = False,
        checkpoint: Any = None,
        checkpoint_every: int = 1,
        verbose: int = 0,
        acceleration: Literal["auto", "quasi-newton"] | None = "auto",
        missing: Literal["raise", "drop", "marginalise", "marginalize"] = "raise",
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.algorithm = algorithm
        self.tol = tol
        self.reg_covar = reg_covar
        self.max_iter = max_iter
        self.n_init = n_init
        self.init_params = init_params
        self.weights_init = weights_init
        self.means_init = means_init
        self.precisions_init = precisions_init
        self.random_state = random_state
        self.warm_start = warm_start
        self.checkpoint = checkpoint
        self.checkpoint_every = checkpoint_every
        self.verbose = verbose
        self.acceleration = acceleration
        self.missing = missing

    def set_params(self, **params: Any) -> Self:
        """Set parameters; names such as ``algorithm__tau`` set those of the algorithm, also of a named one.

        Raises
        ------
        ValueError
            The mixture or its algorithm has no such parameter; ``algorithm="auto"`` has none.
        """
        nested = [name for name in params if name.startswith("algorithm__")]
        algorithm = params.get("algorithm", self.algorithm)
        if nested and isinstance(algorithm, str):
            if algorithm not in ALGORITHMS:
                parameter = nested[0].removeprefix("algorithm__")
                raise ValueError(
                    f"Invalid parameter {parameter!r} for the algorithm {algorithm!r}, which has none. "
                    f"Set algorithm too, to one of {', '.join(ALGORITHMS)}."
                )
            params["algorithm"] = as_policy(algorithm)
        super().set_params(**params)
        return self

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        responsibilities_init: Any = None,
        columns: Any = None,
        features: Any = None,
    ) -> Self:
        """Fit the mixture.

        A fit that fails or is interrupted leaves the estimator as it was before. The `KeyboardInterrupt` says
        whether there is a commit to resume from, and how.

        Parameters
        ----------
        X : dask array, zarr array or array-like of shape (n_samples, n_features), str, DataArray or Dataset
            A str is the path or URL of stored rows (zarr, parquet, CSV, ``.npy`` or, with ``features``,
            netCDF and groups that xarray wrote), or a pattern such as
            ``part-*.npy``, whose matches are read in dask's natural order (``part-9`` before
            ``part-10``). A list of paths is read in its order. For xarray data see ``features``; without it
            a DataArray of two dimensions is rows × features.
        y : ignored
        sample_weight : dask array, zarr array or array-like of shape (n_samples,), optional
            At least 0; a row of weight 0 is not used. With ``features`` a DataArray over dimensions of
            the rows.
        responsibilities_init : dask array, zarr array or array-like, optional
            Shape (n_samples, n_components), rows summing to 1 within 1e-6. They replace every
            other start.
        columns : sequence of str, optional
            The columns that are the features, in this order: of a DataFrame (pandas, polars, dask), a table
            of pyarrow, or stored parquet or CSV. By default all, except the index of a DataFrame that a file
            holds; a warning names it.
        features : str or sequence of str, optional
            The dimension of a DataArray that holds the features, or the variables of a Dataset or of the file
            at a path that are features; or one dimension of the only variable of a file that has it. All
            other dimensions are the rows, chunk by chunk, so a start depends on the chunks.

        Returns
        -------
        self

        Raises
        ------
        InvalidDataError
            The data, weights or starting values cannot be used.
        ConfigError
            A setting is impossible.
        SingularComponentError
            A component collapsed; the message names the remedies.
        CheckpointExistsError
            The checkpoint's place holds a run already.
        CheckpointTakenError
            Another process has continued this run.
        CheckpointError
            The checkpoint cannot be written; the message says what can be resumed.
        StorageError
            Row state of a fit without a checkpoint cannot be written.
        ClusterError
            The dask cluster cannot be used, or failed.

        Warns
        -----
        ConvergenceWarning
            ``max_iter`` was reached first; the warning gives the last change of the log-likelihood, and how
            to continue.
        UserWarning
            The index of a DataFrame, stored in a file, is left out.
        """
        fit_estimator(self, X, sample_weight, responsibilities_init, chosen=FeatureChoice(columns, features))
        self._warn_unless_converged()
        return self

    def _warn_unless_converged(self) -> None:
        tol = DEFAULT_TOL if isinstance(self.tol, str) else self.tol
        if self.stop_reason_ == "tol" and self.gap_ > max(FAR * tol, GOOD_GAP):
            warn_user(
                "The log-likelihood per row changed by less than tol, but could still gain about "
                f"{self.gap_:.2g}. Set tol='statistical', or a smaller tol.",
                ConvergenceWarning,
            )
        if self.stop_reason_ == "max-iter" and self.max_iter > 0:
            warn_user(not_converged_text(self), ConvergenceWarning)

    @classmethod
    def resume(
        cls,
        checkpoint: Any,
        X: Any,
        *,
        sample_weight: Any = None,
        responsibilities_init: Any = None,
        columns: Any = None,
        features: Any = None,
        algorithm: Any = None,
        max_iter: int | None = None,
        checkpoint_every: int | None = None,
        verbose: int = 0,
    ) -> Self:
        """Resume a checkpointed run where it stopped; the results are identical to those without a stop.

        Every object of the last commit is verified first. If one is damaged, the commit before
        it is used, with a warning. A finished run returns its model; one that stopped at
        ``max_iter`` continues if a larger one is given.

        Parameters
        ----------
        checkpoint : str, Path or zarr store
            A path or URL.
        X : dask array, zarr array or array-like of shape (n_samples, n_features)
            The data that the run was begun with, in the same chunks.
        sample_weight : array-like of shape (n_samples,), optional
            The weights that the run was begun with.
        responsibilities_init : array-like of shape (n_samples, n_components), optional
            Needed only if the run was begun with them and has no statistics yet; ignored otherwise.
        columns : sequence of str, optional
            Columns of parquet or CSV; by default those of the run.
        features : str or sequence of str, optional
            As for `fit`; by default the dimension or variables with the names of the run's features.
        algorithm : policy, optional
            Only for a user's own policy, which must match by name and parameters.
        max_iter, checkpoint_every : int, optional
            Replace the settings of the run.
        verbose : int, default=0

        Returns
        -------
        GaussianMixture
            Fitted, with the run's settings.

        Raises
        ------
        CheckpointError
            There is no run, or the store cannot be used.
        CheckpointMismatchError
            The data, the weights, the policy or the format version differ.
        CheckpointCorruptError
            Every commit is damaged.
        CheckpointTakenError
            Another process has continued the run.
        """
        saved = open_saved(checkpoint)
        mixture: Self = saved_estimator(
            cls,
            saved,
            checkpoint,
            algorithm,
            max_iter=max_iter,
            checkpoint_every=checkpoint_every,
            verbose=verbose,
        )
        resume_estimator(
            mixture,
            saved,
            X,
            sample_weight=sample_weight,
            responsibilities_init=responsibilities_init,
            chosen=FeatureChoice(columns, features),
        )
        mixture._warn_unless_converged()
        return mixture

    def fit_predict(
        self, X: Any, y: Any = None, *, columns: Any = None, features: Any = None, **fit_params: Any
    ) -> Any:
        """Fit, and return the labels of X; the same as ``fit(X).predict(X)``."""
        fitted = self.fit(X, y, columns=columns, features=features, **fit_params)
        return fitted.predict(X, columns=columns, features=features)
