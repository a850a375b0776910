"""`GaussianMixture`, and what prepares its fits and publishes their results."""

from emtau_dask.estimator.drawing import DrawnRows, drawn_rows
from emtau_dask.estimator.fitting import fit_estimator, fit_session, is_automatic
from emtau_dask.estimator.gaussian_mixture import GaussianMixture
from emtau_dask.estimator.model_file import FORMAT as MODEL_FORMAT
from emtau_dask.estimator.model_file import read_model, write_model
from emtau_dask.estimator.resuming import mixture_in, open_saved, resume_estimator, saved_estimator
from emtau_dask.estimator.summary import ComponentSummary, FitSummary, gap_text, shown_components, stop_text
from emtau_dask.inputs import Seeds, checked_lazy, opened_path, opened_sources
from emtau_dask.progress import watching

__all__ = [
    "MODEL_FORMAT",
    "ComponentSummary",
    "DrawnRows",
    "FitSummary",
    "GaussianMixture",
    "Seeds",
    "checked_lazy",
    "drawn_rows",
    "fit_estimator",
    "fit_session",
    "gap_text",
    "is_automatic",
    "mixture_in",
    "open_saved",
    "opened_path",
    "opened_sources",
    "read_model",
    "resume_estimator",
    "saved_estimator",
    "shown_components",
    "stop_text",
    "watching",
    "write_model",
]
