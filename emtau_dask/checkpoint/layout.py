"""The arrays of a checkpoint: what they are called, their shapes, and where row state is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from emtau_dask.em import CONTENTS_BYTES, IterationRecord
from emtau_dask.io.objects import ArrayLayout, SlotState
from emtau_dask.mixture.covariance import structure_named

COLUMNS = tuple(field.name for field in dataclasses.fields(IterationRecord))
CHUNK_COLUMNS = ("attempt", "step", "remaining")
DIGEST_BYTES = 32
PARAMETERS = ("weights", "means", "covariances", "precisions_cholesky")
STATISTICS = ("weights", "means", "scatter")


@dataclass(frozen=True, eq=False)
class Shapes:
    """The shapes of a fit's arrays.

    Attributes
    ----------
    sizes : mapping of str to tuple of int
        By name.
    """

    sizes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, covariance_type: str, n_components: int, n_features: int, n_chunks: int) -> Shapes:
        """Return the shapes for a fit's settings."""
        K, d = n_components, n_features
        matrices = structure_named(covariance_type).shape(K, d)
        return cls(
            {
                "weights": (K,),
                "means": (K, d),
                "covariances": matrices,
                "precisions_cholesky": matrices,
                "held_weights": (K,),
                "held_means": (K, d),
                "held_scatter": matrices,
                "centres": (K, d),
                "chunks": (n_chunks, len(CHUNK_COLUMNS)),
                "digests": (n_chunks, DIGEST_BYTES),
                "contents": (n_chunks, CONTENTS_BYTES),
            }
        )

    @staticmethod
    def dtype(name: str) -> np.dtype[Any]:
        """Return the dtype of an array."""
        return np.dtype({"chunks": "int64", "digests": "uint8", "contents": "uint8"}.get(name, "float64"))

    def layouts(self, prefix: str, n_steps: int) -> dict[str, ArrayLayout]:
        """Return the zarr arrays below ``prefix``, of one chunk for each step."""
        return {
            name: ArrayLayout(
                f"{prefix}/{name}",
                (n_steps, *shape),
                (1, *shape),
                self.dtype(name).name,
                ("step", *(f"axis_{i}" for i in range(len(shape)))),
                attributes={"columns": list(CHUNK_COLUMNS)} if name == "chunks" else None,
            )
            for name, shape in self.sizes.items()
        }


def attempt_of(slot: SlotState) -> str:
    """Return the id of the attempt that wrote the row state of a chunk."""
    return slot.key.split("/")[1]


def step_of(slot: SlotState) -> int:
    """Return the step in which it was written."""
    return int(slot.key.rpartition("/")[2].split(".")[1])


def slot_key(attempt: str, step: int, chunk: int) -> str:
    """Return the key of the row state of a chunk."""
    return f"attempts/{attempt}/rows/c.{step}.{chunk}.0.0"
