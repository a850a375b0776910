"""No test has a deadline: a slow machine is no failure."""

from hypothesis import settings

settings.register_profile("emtau", deadline=None)
settings.load_profile("emtau")
