"""What a person sees while a fit runs: a live line, a bar in a notebook, plain lines, the log."""

from emtau_dask.progress.choice import closed_after, observer_for, watching
from emtau_dask.progress.logs import LoggingObserver
from emtau_dask.progress.several import Observers

__all__ = ["LoggingObserver", "Observers", "closed_after", "observer_for", "watching"]
