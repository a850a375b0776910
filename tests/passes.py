"""A pass by the executor that dask's own precedence chooses, as a fit runs it."""

from emtau_dask.em.history import SilentObserver
from emtau_dask.execution.choice import choose_executor
from emtau_dask.execution.executor import MapReduce


class Recorder(SilentObserver):
    """The stages and the chunks done, as they are told."""

    def __init__(self):
        self.stages, self.done = [], []

    def stage(self, name, chunks):
        self.stages.append((name, chunks))

    def chunks_done(self, count):
        assert self.stages
        self.done.append(count)


def joined(parts):
    """Merge results to what spells the tree of merges."""
    return f"({' '.join(map(str, parts))})"


def expected_tree(chunks):
    """Top down: split where numbers differ in their highest differing octal digit, and join the parts."""
    if len(chunks) == 1:
        return str(chunks[0])
    width = 1
    while len({chunk // (8 * width) for chunk in chunks}) > 1:
        width *= 8
    groups = sorted({chunk // width for chunk in chunks})
    return joined(expected_tree([chunk for chunk in chunks if chunk // width == g]) for g in groups)


def run_pass(task, merge, sources, items, *, name="test", stage="", observer=None, costs=None, ahead=None):
    work = MapReduce(task, merge, sources, items, name, stage, costs, ahead)
    return choose_executor().map_reduce(work, observer or SilentObserver())
