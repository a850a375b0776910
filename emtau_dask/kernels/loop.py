"""The E-step over a block of rows as one compiled loop, which releases the interpreter's lock.

All work on one tile of a block is done before the next tile, so a tile stays in the core's own cache. Each
form has a module with its own steps `fill`, `score`, `collect` and `finish`; `loops_of` puts them into the
loops. Only `kernels.dispatch` imports these modules, if numba is installed.
"""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

from emtau_dask.kernels.products import inlined, loop, sum_loop
from emtau_dask.kernels.vectors import in_full_vectors
from emtau_dask.mixture.linalg import Floats, Ints

PREFETCH_ARGUMENTS = 0, 2, 1
"""Arguments of LLVM's prefetch: for reading, into the core's larger cache, of data."""
LOG2_E = 1.0 / math.log(2.0)
LN_2_HIGH, LN_2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
"""ln 2 as a sum; the product of the first term and an exponent is exact."""
LN_2_HIGH_SINGLE, LN_2_LOW_SINGLE = np.float32(0.693359375), np.float32(-2.12194440e-4)
TO_INTEGER, TO_INTEGER_SINGLE = 1.5 * 2.0**52 + 1023, np.float32(1.5 * 2.0**23 + 127)
"""Adding one of these to a number rounds it to an integer. The last bits of the sum are the integer plus the
bias of exponents."""
C2, C3, C4, C5, C6, C7, C8, C9, C10, C11, C12, C13 = (1.0 / math.factorial(i) for i in range(2, 14))
S1, S2, S3, S4, S5, S6, S7 = (np.float32(1.0 / math.factorial(i)) for i in range(1, 8))
ROOT_OF_HALF = int(np.float64(math.sqrt(0.5)).view(np.int64))
"""The bits of √½ as an integer."""
L1, L2, L3, L4, L5, L6, L7, L8, L9, L10 = (2.0 / (2 * i + 1) for i in range(1, 11))


class Results(NamedTuple):
    """Results of a block of n rows."""

    log_likelihoods: Floats  # (n,), nats
    labels: Ints  # (n,), the first component of equal ones; (0,) if they are not needed
    largest: Floats  # the responsibilities of the labels, (n,) or (0,)
    moments: Any  # a named tuple of the form, of views of ``numbers``
    numbers: Floats  # all values of the moments, (m,)


class Observations(NamedTuple):
    """Results of a block of n rows without sums."""

    log_likelihoods: Floats  # (n,), nats
    labels: Ints  # (n,), the first component of equal ones
    responsibilities: Floats  # (K, n), or (0, n) if they are not needed


class BlockLoops(NamedTuple):
    """The loops over blocks whose rows are scored in one form."""

    accumulate: Any
    observe: Any  # None if the form only accumulates


def fill(constants: Any, rows: Any, buffers: Any) -> None:
    """Write at most T rows into the tile, in the layout of the form's products; compiled code only."""
    raise NotImplementedError


def score(constants: Any, buffers: Any) -> None:
    """Write log-densities of the tile, minus the ceiling, into the scores; compiled code only."""
    raise NotImplementedError


def collect(constants: Any, rows: Any, weights: Any, buffers: Any, moments: Any) -> None:
    """Add the moments of the tile's rows; compiled code only.

    The scores now hold their responsibilities, times ``weights`` (m,) or (0,), and 0 in the other columns.
    """
    raise NotImplementedError


def finish(constants: Any, buffers: Any, moments: Any) -> None:
    """Add the moments of the rows that are still in the buffers; compiled code only."""
    raise NotImplementedError


def loops_of(form: str, **steps: Any) -> BlockLoops:
    """Return the loops over blocks of a form, with its own `fill`, `score`, `collect` and `finish`.

    The steps are functions decorated by `inlined`, so numba compiles each form's loops as one function. It
    would optimise a function that is chosen by type twice: by itself, and as a part of the loops.
    """
    step = _with_steps(_to_responsibilities, form, steps)
    steps = steps | {"_to_responsibilities": inlined(step)}
    return BlockLoops(*(loop(_with_steps(each, form, steps)) for each in (_accumulate, _observe)))


def _with_steps(function: Any, form: str, steps: dict[str, Any]) -> Any:
    """Return a copy of a function of this module that calls ``steps`` by their names."""
    copied = FunctionType(function.__code__, globals() | steps, function.__name__)
    copied.__qualname__ = f"{function.__name__}-{form}"
    return copied


@intrinsic
def _power_of_two(context: Any, value: Any) -> Any:
    """Return 2 to the power that the last bits of ``value`` hold, with the bias of exponents."""

    def built(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        width, fraction = (64, 52) if value == types.float64 else (32, 23)
        integer = ir.IntType(width)
        bits = builder.bitcast(arguments[0], integer)
        power = builder.shl(bits, ir.Constant(integer, fraction))
        return builder.bitcast(power, ir.DoubleType() if width == 64 else ir.FloatType())

    return value(value), built


@intrinsic
def _exponent(context: Any, value: Any) -> Any:
    """Return the integer p for which ``value / 2^p`` is between √½ and √2, of a positive normal number."""

    def built(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(64)
        beyond = builder.sub(builder.bitcast(arguments[0], integer), integer(ROOT_OF_HALF))
        return builder.sitofp(builder.ashr(beyond, integer(52)), ir.DoubleType())

    return types.float64(types.float64), built


@intrinsic
def _fraction(context: Any, value: Any) -> Any:
    """Return ``value / 2^p``, between √½ and √2, of a positive normal number."""

    def built(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(64)
        bits = builder.bitcast(arguments[0], integer)
        power = builder.ashr(builder.sub(bits, integer(ROOT_OF_HALF)), integer(52))
        return builder.bitcast(builder.sub(bits, builder.shl(power, integer(52))), ir.DoubleType())

    return types.float64(types.float64), built


@intrinsic
def _multiply_add(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a b + c``, rounded once if the machine has an instruction for it."""

    def built(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = arguments[0].type
        name = "llvm.fmuladd.f64" if kind == ir.DoubleType() else "llvm.fmuladd.f32"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * 3), name)
        return builder.call(function, arguments)

    return a(a, a, a), built


@intrinsic
def _fetch(_: Any, values: Any, i: Any) -> Any:
    """Prefetch the cache line of ``values[i]``."""

    def built(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte, integer = ir.IntType(8), ir.IntType(32)
        place = builder.bitcast(builder.gep(array.data, [arguments[1]]), byte.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), integer, integer, integer])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [place, *(integer(argument) for argument in PREFETCH_ARGUMENTS)])
        return context.get_dummy_value()

    return types.void(values, types.intp), built


@intrinsic
def flattened(_: Any, matrix: Any) -> Any:
    """Return the numbers of a matrix in C order, as a vector of the same memory."""

    def built(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = context.make_array(signature.args[0])(context, builder, arguments[0])
        numbers = context.make_array(signature.return_type)(context, builder)
        size = builder.mul(*cgutils.unpack_tuple(builder, whole.shape))
        populate_array(numbers, whole.data, [size], [whole.itemsize], whole.itemsize, None)
        return numbers._getvalue()

    if matrix.ndim != 2 or matrix.layout != "C":
        raise TypingError(f"this is not a matrix in C order: {matrix}")
    return types.Array(matrix.dtype, 1, "C", readonly=not matrix.mutable)(matrix), built


def exponential(value: Any) -> Any:
    """Return the exponential of a number whose exponential is a normal number; compiled code only."""
    raise NotImplementedError


def _exponential_double(value: Any) -> Any:
    shifted = value * LOG2_E + TO_INTEGER
    power = shifted - TO_INTEGER
    r = (value - power * LN_2_HIGH) - power * LN_2_LOW
    r2 = r * r
    r4 = r2 * r2
    low = r2 * (C2 + r * C3) + r4 * ((C4 + r * C5) + r2 * (C6 + r * C7))
    high = (C8 + r * C9) + r2 * (C10 + r * C11) + r4 * (C12 + r * C13)
    return _power_of_two(shifted) * (1.0 + (r + (low + (r4 * r4) * high)))


def _exponential_single(value: Any) -> Any:
    shifted = value * np.float32(LOG2_E) + TO_INTEGER_SINGLE
    power = shifted - TO_INTEGER_SINGLE
    r = (value - power * LN_2_HIGH_SINGLE) - power * LN_2_LOW_SINGLE
    r2 = r * r
    tail = (S2 + r * S3) + r2 * ((S4 + r * S5) + r2 * (S6 + r * S7))
    return _power_of_two(shifted) * (S1 + (r + r2 * tail))


@overload(exponential, jit_options={"fastmath": {"contract"}})
def _exponential_of(value: Any) -> Any:
    return _exponential_single if value == types.float32 else _exponential_double


@loop
def logarithm(value: Any) -> Any:
    """Return the logarithm of a positive normal number, NaN of infinity and NaN; compiled code only.

    The result is undefined for 0, subnormal and negative numbers. With f the fraction less 1 and
    s = f / (2 + f), the logarithm of the fraction is 2 artanh(s), written as f less smaller terms.
    """
    power = _exponent(value)
    f = _fraction(value) - 1.0
    s = f / (2.0 + f)
    z = s * s
    z2 = z * z
    z4 = z2 * z2
    low = (L1 + z * L2) + z2 * (L3 + z * L4)
    high = (L5 + z * L6) + z2 * (L7 + z * L8) + z4 * (L9 + z * L10)
    half = 0.5 * f * f
    tail = s * (half + z * (low + z4 * high)) + power * LN_2_LOW
    return power * LN_2_HIGH + (f - (half - tail)) + (value - value)


@sum_loop
def sum_of_logarithms(sums: Any, peaks: Any, ceiling: Any, log_likelihoods: Any) -> Any:
    """Write ``ln sums + ceiling + peaks`` of each of n rows, and return the total; peaks may be (0,).

    No sum is below the exponential of the least exponent; with peaks, none is below 1.
    """
    total = 0.0
    for t in range(len(log_likelihoods)):
        found = logarithm(np.float64(sums[t])) + ceiling
        if len(peaks) > 0:
            found += peaks[t]
        log_likelihoods[t] = found
        total += found
    return total


@sum_loop
def zero_if_finite(values: Any) -> Any:
    """Return 0 if all (m,) values are finite, else NaN."""
    total = 0.0
    for i in range(len(values)):
        total += values[i] * 0.0
    return total


@sum_loop
def squared_length(values: Any) -> Any:
    """Return the sum of the squares of (m,) values, in their dtype."""
    total = values.dtype.type(0)
    for i in range(len(values)):
        total += values[i] * values[i]
    return total


@inlined
def _fetch_part(values: Any, part: Any, parts: Any) -> None:
    """Prefetch one of ``parts`` parts of (m,) values."""
    for i in range(len(values) * part // parts, len(values) * (part + 1) // parts, 64 // values.itemsize):
        _fetch(values, i)


@inlined
def exponentiate(scores: Any, sums: Any, least: Any, ahead: Any) -> None:
    """Replace the first m scores of each component by exponentials, and write their m sums.

    Exponentials of numbers below ``least`` count as 0. Meanwhile prefetch the values ``ahead`` (a,).
    """
    nothing = sums.dtype.type(0)
    for t in range(len(sums)):
        sums[t] = nothing
    for k in range(len(scores)):
        _fetch_part(ahead, k, len(scores))
        of_component = scores[k]
        for t in range(len(sums)):
            value = of_component[t]
            far = value < least
            found = exponential(least if far else value)
            found = nothing if far else found
            of_component[t] = found
            sums[t] += found


@inlined
def _any_below(values: Any, bound: Any) -> Any:
    found = 0
    for t in range(len(values)):
        found += values[t] < bound
    return found > 0


@inlined
def _subtract_peaks(scores: Any, peaks: Any) -> None:
    """Write the largest score of each of the first m rows, and subtract it from all scores of the row."""
    for t in range(len(peaks)):
        peaks[t] = scores[0, t]
    for k in range(1, len(scores)):
        of_component = scores[k]
        for t in range(len(peaks)):
            peaks[t] = of_component[t] if of_component[t] > peaks[t] else peaks[t]
    for k in range(len(scores)):
        of_component = scores[k]
        for t in range(len(peaks)):
            of_component[t] -= peaks[t]


@inlined
def divide(exponentials: Any, sums: Any, inverses: Any) -> None:
    """Divide the exponentials of the first m rows by their sums; ``inverses`` (m,) is written.

    Products with an inverse take a fraction of the time of quotients. A correction makes their rounding that
    of quotients, if the machine multiplies and adds in one instruction (Markstein,
    Computation of elementary functions on the IBM RISC System/6000 processor, IBM J. Res. Dev. 34, 1990).
    """
    one = exponentials.dtype.type(1)
    for t in range(len(inverses)):
        inverses[t] = one / sums[t]
    for k in range(len(exponentials)):
        of_component = exponentials[k]
        for t in range(len(inverses)):
            near = of_component[t] * inverses[t]
            of_component[t] = _multiply_add(_multiply_add(-near, sums[t], of_component[t]), inverses[t], near)


@inlined
def most_probable(responsibilities: Any, labels: Any, largest: Any) -> None:
    """Write the largest responsibility of each of the first m rows, and the first component that has it."""
    for t in range(len(labels)):
        labels[t] = 0
        largest[t] = responsibilities[0, t]
    for k in range(1, len(responsibilities)):
        of_component = responsibilities[k]
        for t in range(len(labels)):
            larger = of_component[t] > largest[t]
            labels[t] = k if larger else labels[t]
            largest[t] = of_component[t] if larger else largest[t]


@inlined
def sort_places(keys: Any, ends: Any, order: Any) -> None:
    """Write the places of the ``keys`` (n,), below m, in the order of the keys; equal ones keep their order.

    ``ends`` (m + 1,) becomes the end of the places of each key.
    """
    for key in range(len(ends)):
        ends[key] = 0
    for i in range(len(keys)):
        ends[keys[i] + 1] += 1
    for key in range(1, len(ends)):
        ends[key] += ends[key - 1]
    for i in range(len(keys)):
        key = keys[i]
        order[ends[key]] = i
        ends[key] += 1


@inlined
def add(part: Any, moments: Any) -> None:
    """Add a tile's moments, a matrix, to those of its block."""
    for k in range(len(part)):
        into, of_component = moments[k], part[k]
        for f in range(len(of_component)):
            into[f] += of_component[f]


def _to_responsibilities(
    rows: Any, constants: Any, buffers: Any, relative: Any, ahead: Any, log_likelihoods: Any
) -> Any:
    """Turn the scores of a tile's rows (m, d) into responsibilities, and those of other columns into 0.

    If ``relative``, exponents are relative to the largest of each row. They become relative if a row's sum is
    so small that exponentials that count as 0 would not be negligible. The log-likelihoods are written.
    Returns the new ``relative``, and the sum of the log-likelihoods. Meanwhile the values ``ahead`` are
    prefetched.
    """
    scores, m = buffers.scores, len(rows)
    sums = buffers.sums[:m]
    fill(constants, rows, buffers)
    while True:
        score(constants, buffers)
        peaks = buffers.peaks[: m if relative else 0]
        if relative:
            _subtract_peaks(scores, peaks)
        exponentiate(scores, sums, constants.least, ahead)
        if relative or not _any_below(sums, exponential(scores.dtype.type(0.5) * constants.least)):
            break
        relative = True
    total = sum_of_logarithms(sums, peaks, constants.ceiling, log_likelihoods)
    divide(scores, sums, buffers.peaks[:m])
    for k in range(len(scores)):
        of_component = scores[k]
        for t in range(m, len(of_component)):
            of_component[t] = 0
    return relative, total


def _accumulate(rows: Any, weights: Any, constants: Any, buffers: Any, results: Any) -> Any:
    """Score a block of rows (n, d) and sum its moments; weights are (n,), or (0,) if every weight is 1.

    Constants and buffers are named tuples of a form; results are `Results`. Return two numbers: the sum of
    the squares of all values of the rows, and the sum of the log-likelihoods in nats, which is not finite
    if one of these or of the moments is not.
    """
    in_full_vectors()
    scores = buffers.scores
    tile = scores.shape[1]
    relative = False
    squared = total = 0.0
    for i in range(len(results.numbers)):
        results.numbers[i] = 0.0
    for begin in range(0, len(rows), tile):
        of_tile = rows[begin : begin + tile]
        end = begin + len(of_tile)
        squared += squared_length(flattened(of_tile))
        ahead, log_likelihoods = flattened(rows[end : end + tile]), results.log_likelihoods[begin:end]
        relative, part = _to_responsibilities(of_tile, constants, buffers, relative, ahead, log_likelihoods)
        total += part
        if len(results.labels) > 0:
            most_probable(scores, results.labels[begin:end], results.largest[begin:end])
        if len(weights) > 0:
            for k in range(len(scores)):
                of_component = scores[k]
                for t in range(end - begin):
                    of_component[t] *= weights[begin + t]
        collect(constants, of_tile, weights[begin:end], buffers, results.moments)
    finish(constants, buffers, results.moments)
    return squared, total + zero_if_finite(results.numbers)


def _observe(rows: Any, constants: Any, buffers: Any, results: Any) -> Any:
    """Score a block of rows (n, d) without sums; see `_accumulate`. Results are `Observations`.

    Return the sum of the squares of all values of the rows, and the sum of the log-likelihoods.
    """
    in_full_vectors()
    scores = buffers.scores
    tile = scores.shape[1]
    relative = False
    squared = total = 0.0
    for begin in range(0, len(rows), tile):
        of_tile = rows[begin : begin + tile]
        end = begin + len(of_tile)
        squared += squared_length(flattened(of_tile))
        ahead, log_likelihoods = flattened(rows[end : end + tile]), results.log_likelihoods[begin:end]
        relative, part = _to_responsibilities(of_tile, constants, buffers, relative, ahead, log_likelihoods)
        total += part
        most_probable(scores, results.labels[begin:end], buffers.peaks[: end - begin])
        for k in range(len(results.responsibilities)):
            of_component, out = scores[k], results.responsibilities[k]
            for t in range(end - begin):
                out[begin + t] = of_component[t]
    return squared, total
