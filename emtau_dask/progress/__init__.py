"""What a person sees while a fit runs: a live line, a bar in a notebook, plain lines, the log."""

from emtau_dask.progress.lines import Lines, Observers, to_log
from emtau_dask.progress.live import closed_after, observer_for, watching

__all__ = ["Lines", "Observers", "closed_after", "observer_for", "to_log", "watching"]
