"""Where warnings point: at the line of the user's by which the package was entered."""

import contextlib
import re
import threading
import warnings

import pytest

from emtau_dask.errors import line_of_user, warn_user

INSIDE = {"__name__": "emtau_dask.made_up", "warn_user": warn_user, "contextlib": contextlib}
exec(
    compile(
        """
def deep():
    warn_user("deep")

@contextlib.contextmanager
def held():
    warn_user("before")
    yield
    warn_user("after")

def between(call):
    call()
""",
        "inside.py",
        "exec",
    ),
    INSIDE,
)


def lines(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [(warning.filename, str(warning.message)) for warning in found]


def test_a_warning_points_at_the_caller():
    assert lines(lambda: INSIDE["deep"]()) == [(__file__, "deep")]


def test_so_does_one_of_a_context_manager():
    def use():
        with INSIDE["held"]():
            pass

    assert lines(use) == [(__file__, "before"), (__file__, "after")]


def test_code_of_the_users_within_is_not_where_the_package_was_entered():
    assert lines(lambda: INSIDE["between"](lambda: INSIDE["deep"]())) == [(__file__, "deep")]


@pytest.mark.parametrize("name", [None, 3, "emtau"])
def test_callers_may_have_any_name(name):
    code = compile("deep()", "nameless.py", "exec")
    assert lines(lambda: exec(code, {"__name__": name, "deep": INSIDE["deep"]})) == [("nameless.py", "deep")]


def test_another_thread_can_be_given_the_line():
    line = line_of_user()
    threads = [threading.Thread(target=warn_user, args=("late",), kwargs={"line": line})]

    def run():
        for thread in threads:
            thread.start()
            thread.join()

    assert lines(run) == [(__file__, "late")]


def test_filters_by_module_work():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", module=re.escape(__name__))
        INSIDE["deep"]()
    assert found == []
