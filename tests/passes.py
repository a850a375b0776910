"""A pass by the executor that dask's own precedence chooses, as a fit runs it."""

from emtau_dask.em import SilentObserver
from emtau_dask.execution import Pass, choose_executor


def run_pass(task, merge, sources, items, *, name="test", stage="", observer=None, costs=None, ahead=None):
    work = Pass(task, merge, sources, items, name, stage, costs, ahead)
    return choose_executor().map_reduce(work, observer or SilentObserver())
