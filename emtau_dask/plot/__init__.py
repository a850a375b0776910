"""Pictures of fits, data and components, in scikit-learn's Display protocol; drawn by matplotlib."""

from emtau_dask.plot.components import ComponentsDisplay
from emtau_dask.plot.convergence import ConvergenceDisplay
from emtau_dask.plot.pairs import PairsDisplay
from emtau_dask.plot.selection import SelectionDisplay
from emtau_dask.plot.uncertainty import UncertaintyDisplay

__all__ = [
    "ComponentsDisplay",
    "ConvergenceDisplay",
    "PairsDisplay",
    "SelectionDisplay",
    "UncertaintyDisplay",
]
