"""Which cases of a test the default run keeps; the others are marked `exhaustive`.

`CONTRIBUTING.md` says which tier a test belongs to.
"""

from collections import Counter

import pytest

TIERS = {"exhaustive", "kills", "cluster", "sample", "docs", "stories", "soak"}


def exhaustive_but(kept, cases):
    """Cases for `parametrize`, of which the default run has those that are in ``kept``."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.exhaustive) for case in cases]


def exhaustive_but_each_value_once(cases):
    """Tuples for `parametrize`, of which the default run has some: each value of each place is in one."""
    return exhaustive_but(
        set(cases) - set(beyond_each_value_once({c: list(enumerate(c)) for c in cases})), cases
    )


def beyond_each_value_once(values):
    """Of the cases of a product, those that the default run leaves out.

    Parameters
    ----------
    values : dict of case to list of hashable
        The values of each case, one of each axis.

    Returns
    -------
    list
        The cases but some in which each value occurs. Again and again, the case with the most values that did
        not occur before is chosen; of several the one whose values occurred least.
    """
    rest, used = list(values), Counter()
    missing = {value for case in rest for value in values[case]}
    while missing:
        best = max(
            rest, key=lambda case: (len(missing & set(values[case])), -sum(used[v] for v in values[case]))
        )
        rest.remove(best)
        missing -= set(values[best])
        used.update(values[best])
    return rest


def axes_of(item):
    """The values of a case: one for each `parametrize`, and for each fixture that has several."""
    params = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    axes = []
    for marker in item.iter_markers("parametrize"):
        names = marker.args[0] if marker.args else marker.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        axes.append(tuple((name, id(params.pop(name, None))) for name in names))
    return axes + [((name, id(value)),) for name, value in params.items()]


def mark_products(items):
    """Mark what the default run leaves out of tests that go over a product."""
    products = {}
    for item in items:
        if len(axes := axes_of(item)) > 1:
            tiers = frozenset(marker.name for marker in item.iter_markers()) & TIERS
            products.setdefault((item.nodeid.partition("[")[0], tiers), {})[item] = axes
    for cases in products.values():
        for item in beyond_each_value_once(cases):
            item.add_marker(pytest.mark.exhaustive)
