"""Progress in Python's own logs, under the logger ``emtau_dask``."""

from __future__ import annotations

import logging

from emtau_dask.em import IterationRecord
from emtau_dask.messages import one_line
from emtau_dask.mixture.model import MixtureParameters
from emtau_dask.progress.tracking import active, number, rate

LOG = logging.getLogger("emtau_dask.fit")


class LoggingObserver:
    """Passes over all rows, stages and remarks at INFO; other iterations and refused steps at DEBUG."""

    def stage(self, name: str, chunks: int) -> None:
        """Log the name of a pass, unless it is an iteration."""
        if not name.startswith("iteration "):
            LOG.info("%s: %s chunks", name, f"{chunks:,}")

    def chunks_done(self, count: int) -> None:
        """Ignore."""

    def iteration(self, record: IterationRecord, parameters: MixtureParameters) -> None:
        """Log an iteration."""
        level = logging.INFO if record.full_pass and record.accepted else logging.DEBUG
        if LOG.isEnabledFor(level):
            LOG.log(
                level,
                "iteration %d%s: bound %.9g, gap %s, active %s, %.3g s, %s",
                record.iteration,
                "" if record.accepted else " (step refused)",
                record.lower_bound,
                number(record.gap, ".1e"),
                active(record),
                record.seconds,
                rate(record),
            )

    def note(self, message: str) -> None:
        """Log a remark."""
        LOG.info("%s", one_line(message))

    def close(self, *, done: bool) -> None:
        """Ignore."""
