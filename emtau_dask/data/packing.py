"""Decoding of packed numbers, as the attributes of an array that xarray and netCDF write describe it.

Numbers equal to ``_FillValue`` or ``missing_value`` are missing. The others are multiplied by
``scale_factor``, and ``add_offset`` is added (CF conventions, sections 2.5.1 and 8.1). xarray does the same.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emtau_dask.data.source import Loaded, RangeReader, RangeSource
from emtau_dask.errors import InvalidDataError, InvalidDtypeError, short

DECODED_BYTES = 8 + 1
"""Memory to decode a value (bytes): float64, and whether it is missing."""
DIMENSIONS = "_ARRAY_DIMENSIONS"
"""xarray's attribute of arrays of format 2. xarray reads the fill value of such an array as missing."""


@dataclass(frozen=True)
class Packing:
    """How stored numbers are decoded.

    Attributes
    ----------
    missing : tuple of number
        Stored numbers that are decoded as NaN.
    scale, offset : float
        All others are multiplied by the scale, then the offset is added.
    kind : str
        ``"u"`` or ``"i"`` if the bits of stored integers are those of unsigned or signed ones; "" for as
        stored.
    """

    missing: tuple[float, ...] = ()
    scale: float = 1.0
    offset: float = 0.0
    kind: str = ""

    @classmethod
    def of(cls, attributes: Mapping[str, Any], fill_value: object, where: str) -> Packing | None:
        """Return the decoding that the attributes of an array describe; None if there is none.

        Parameters
        ----------
        attributes : mapping
        fill_value : object
            Fill value in the document of an array of format 2; None for other formats.
        where : str
            The array's name in errors.

        Raises
        ------
        InvalidDataError
            A scale or an offset is not a number.
        InvalidDtypeError
            The numbers are dates.
        """
        units = attributes.get("units")
        if isinstance(units, str) and " since " in units:
            raise InvalidDtypeError(
                f"{where} holds dates ({units!r}), not real numbers. Convert them, for example to an array "
                "of seconds without the attribute units."
            )
        missing = [*_numbers(attributes.get("_FillValue")), *_numbers(attributes.get("missing_value"))]
        if DIMENSIONS in attributes:
            missing += _numbers(fill_value)
        packing = cls(
            tuple(dict.fromkeys(value for value in missing if not math.isnan(value))),
            _factor("scale_factor", attributes, 1.0, where),
            _factor("add_offset", attributes, 0.0, where),
            {"true": "u", "false": "i"}.get(str(attributes.get("_Unsigned")).lower(), ""),
        )
        return None if packing == cls() else packing

    def dtype(self, stored: np.dtype[Any]) -> np.dtype[Any]:
        """Return the type of decoded numbers: float64, or a stored floating-point type without a scale."""
        unscaled = stored.kind == "f" and (self.scale, self.offset) == (1.0, 0.0)
        return stored if unscaled else np.dtype(np.float64)

    def decoded(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the decoded numbers."""
        if self.kind and values.dtype.kind in "iu":
            values = values.view(values.dtype.str.replace(values.dtype.kind, self.kind))
        decoded = values.astype(self.dtype(values.dtype))
        if self.scale != 1.0:
            decoded *= self.scale
        if self.offset != 0.0:
            decoded += self.offset
        for number in self.missing:
            if _is_representable(number, values.dtype):
                decoded[values == np.asarray(number).astype(values.dtype)] = np.nan
        return decoded


def _is_representable(number: float, dtype: np.dtype[Any]) -> bool:
    """Return whether a type can hold a number; unsigned integers also hold the bits of a negative one."""
    if dtype.kind == "f":
        return math.isinf(number) or abs(number) <= float(np.finfo(dtype).max)
    size = 2 ** (8 * dtype.itemsize)
    return dtype.kind in "iu" and float(number).is_integer() and -size // 2 <= number < size


def _numbers(value: object) -> list[float]:
    """Return the numbers that an attribute holds. Other values are ignored, as by xarray."""
    numbers = map(_number, value if isinstance(value, list) else [value])
    return [number for number in numbers if number is not None]


def _factor(name: str, attributes: Mapping[str, Any], default: float, where: str) -> float:
    """Return a scale or an offset; it may be the single value of a list."""
    value = attributes.get(name)
    if value is None:
        return default
    number = _number(value[0] if isinstance(value, list) and len(value) == 1 else value)
    if number is None:
        raise InvalidDataError(
            f"the attribute {name} of {where} is {short(value)}, which is not a number, so its values cannot "
            "be decoded. Correct or remove the attribute."
        )
    return float(number)


def _number(value: object) -> float | None:
    """Return a number, None for anything else; xarray writes some numbers in base64."""
    if isinstance(value, str):
        try:
            (value,) = struct.unpack("<d", base64.standard_b64decode(value))
        except (ValueError, struct.error):
            value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(str(value))
    if isinstance(value, np.number):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        float(value)
    except OverflowError:
        return None
    return value


@dataclass(frozen=True)
class UnpackedRows(RangeReader):
    """Decodes the numbers of another reader."""

    stored: RangeReader
    packing: Packing
    row_values: int

    def read(self, start: int, stop: int) -> Loaded:
        """Return the decoded rows; the bytes are those that were read."""
        loaded = self.stored.read(start, stop)
        return loaded._replace(values=self.packing.decoded(loaded.values))

    def identity(self) -> str:
        """Return the identity of the stored numbers."""
        return self.stored.identity()

    def peak_bytes(self, start: int, stop: int) -> int:
        """Return an upper bound of the bytes that `read` holds: the stored rows, and the decoded ones."""
        decoding = (stop - start) * self.row_values * DECODED_BYTES
        return self.stored.peak_bytes(start, stop) + decoding


def unpacked(source: RangeSource, packing: Packing | None) -> RangeSource:
    """Return a source of the decoded numbers; the same source if there is no packing."""
    if packing is None:
        return source
    rows = UnpackedRows(source.ranges, packing, math.prod(source.shape[1:]))
    return replace(source, ranges=rows, dtype=packing.dtype(source.dtype))
