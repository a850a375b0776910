"""What holds for all tests."""

import os
import signal

import pytest
import tiers
from hypothesis import settings

settings.register_profile("emtau", deadline=None)  # a slow machine is no failure
settings.load_profile("emtau")

# Idle threads of BLAS and OpenMP sleep. They would keep cores busy for which others wait, and of small fits
# by scikit-learn that takes most of the time. Libraries read this when they are loaded.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A suite that a shell runs in the background ignores SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    tiers.mark_products(items)
