"""A pass by the executor that dask's own precedence chooses, as a fit runs it."""

from emtau_dask.em.history import SilentObserver
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.executor import Pass


def run_pass(task, merge, sources, items, *, name="test", stage="", observer=None, costs=None, ahead=None):
    work = Pass(task, merge, sources, items, name, stage, costs, ahead)
    return choose_executor().map_reduce(work, observer or SilentObserver())
