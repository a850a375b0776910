"""Integer seeds from whatever scikit-learn or NumPy calls a random state."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils import check_random_state

from emtau_dask.errors import ConfigError
from emtau_dask.messages import short


class Seeds:
    """A stream of seeds from None, an integer, a RandomState or a Generator.

    Raises
    ------
    ConfigError
        ``random_state`` is none of these.
    """

    def __init__(self, random_state: Any) -> None:
        is_generator = isinstance(random_state, np.random.Generator)
        try:
            self._state = random_state if is_generator else check_random_state(random_state)
        except (ValueError, OverflowError) as error:
            raise ConfigError(
                f"random_state is {short(random_state)}; it must be None, an integer from 0 to 2**32 - 1, a "
                "RandomState or a Generator."
            ) from error

    def draw(self) -> int:
        """Return the next seed, from 0 to 2**31 - 2."""
        pick = getattr(self._state, "integers", None) or self._state.randint
        return int(pick(2**31 - 1))
