"""What holds for all tests."""

import signal

from hypothesis import settings

settings.register_profile("emtau", deadline=None)  # a slow machine is no failure
settings.load_profile("emtau")

# A suite that a shell runs in the background ignores SIGINT, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
