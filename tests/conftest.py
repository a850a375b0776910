"""What holds for all tests."""

import os
import signal

from hypothesis import settings

settings.register_profile("emtau", deadline=None)  # a slow machine is no failure
settings.load_profile("emtau")

# Threads of BLAS and OpenMP that have nothing to do sleep. They would keep cores busy, where other tests and processes
# wait for one: most of the time of small fits by scikit-learn. Libraries read this when they are loaded.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A suite that a shell runs in the background ignores SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
