"""The process that clusters are forked from, once for all tests."""

import pytest
from reliability.zygote import Zygote


@pytest.fixture(scope="session")
def zygote():
    with Zygote("clusters") as zygote:
        yield zygote
