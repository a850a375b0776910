"""Pictures of fits, data and components, in scikit-learn's Display protocol; drawn by matplotlib."""

from emtau_dask.plot.components import ComponentsDisplay
from emtau_dask.plot.convergence import ConvergenceDisplay
from emtau_dask.plot.sample import MAX_ROWS
from emtau_dask.plot.selection import Candidate, Selection, SelectionDisplay
from emtau_dask.plot.style import check_matplotlib, figure_of
from emtau_dask.plot.uncertainty import UncertaintyDisplay

__all__ = [
    "MAX_ROWS",
    "Candidate",
    "ComponentsDisplay",
    "ConvergenceDisplay",
    "Selection",
    "SelectionDisplay",
    "UncertaintyDisplay",
    "check_matplotlib",
    "figure_of",
]
