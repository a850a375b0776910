"""Steps of products in vectors of the machine's width, written in LLVM's intermediate representation.

Compiled code calls them as functions of matrices in C order and of integers: the positions where they begin,
and their depth. They check nothing. A step keeps its sums in registers; see `kernels.products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

from llvmlite import ir
from numba import config, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.core.errors import TypingError
from numba.extending import intrinsic

ROWS, COLUMNS = 4, 3
"""Rows and vectors of the sums in registers: these 12 vectors and 4 others fill the registers of most
machines. There is a function for each number of rows up to 4, and, if a product is added to earlier sums, for
each number of vectors up to 3; otherwise groups of vectors overlap."""
WIDTHS = (("+avx512f", 64), ("+avx", 32))
SIDE = 4
"""Number of rows and features that are transposed at a time."""
INDEX = ir.IntType(64)


def _vector_bytes() -> int:
    """Return the width of the vectors that numba compiles for."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return next((width for feature, width in WIDTHS if feature in features.split(",")), 16)


VECTOR_BYTES = _vector_bytes()
LANES = VECTOR_BYTES // 8
"""Values of float64 in a vector of the machine."""


def _in_full_vectors(_: Any) -> Any:
    """Let LLVM use vectors of the machine's width throughout the calling function.

    Otherwise it uses half the width on machines whose clock slows down with wide vectors.
    """

    def built(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        attribute = f'"prefer-vector-width"="{8 * VECTOR_BYTES}"'
        # llvmlite's own method knows no attribute with a value.
        set.add(builder.function.attributes, attribute)
        return context.get_dummy_value()

    return types.void(), built


in_full_vectors = intrinsic(_in_full_vectors)


class _Matrix:
    """A matrix in C order, in code that is being built."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any, lanes: int | None) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.itemsize = kind.dtype.bitwidth // 8
        self.lanes = lanes or VECTOR_BYTES // self.itemsize
        self.element = ir.DoubleType() if self.itemsize == 8 else ir.FloatType()
        self.vector = ir.VectorType(self.element, self.lanes)
        self.height, self.width = (builder.extract_value(array.shape, axis) for axis in (0, 1))
        self._builder, self._data = builder, array.data

    def place(self, row: Any, column: Any, rows_on: int = 0, vectors_on: int = 0) -> Any:
        """Return the place of a number, moved by rows and vectors."""
        builder = self._builder
        begin = builder.mul(builder.add(row, INDEX(rows_on)), self.width)
        column = builder.add(column, INDEX(vectors_on * self.lanes))
        return builder.gep(self._data, [builder.add(begin, column)], source_etype=self.element)

    def load(self, place: Any) -> Any:
        """Return the vector that begins at a place."""
        begin = self._builder.bitcast(place, self.vector.as_pointer())
        return self._builder.load(begin, align=self.itemsize, typ=self.vector)

    def store(self, vector: Any, place: Any) -> None:
        """Write a vector that begins at a place."""
        begin = self._builder.bitcast(place, self.vector.as_pointer())
        self._builder.store(vector, begin, align=self.itemsize)

    def repeated(self, place: Any) -> Any:
        """Return a vector that repeats the number at a place."""
        builder, undefined = self._builder, ir.Constant(self.vector, ir.Undefined)
        number = builder.load(place, typ=self.element)
        vector = builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), [0] * self.lanes)
        return builder.shuffle_vector(vector, undefined, zeros)

    def mixed(self, a: Any, b: Any, places: Sequence[int]) -> Any:
        """Return the numbers at some places of two vectors, one after the other."""
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.lanes), places)
        return self._builder.shuffle_vector(a, b, mask)

    def call(self, name: str, result: Any, *arguments: Any, **options: Any) -> Any:
        """Return the result of LLVM's function of this name for such vectors."""
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        whole = f"llvm.{name}.v{self.lanes}f{8 * self.itemsize}"
        function = cgutils.get_or_insert_function(self._builder.module, kind, whole)
        return self._builder.call(function, arguments, **options)


class _Sums:
    """Vectors, at some rows and columns, that begin as 0; LLVM puts them into registers."""

    def __init__(self, builder: Any, like: _Matrix, where: Iterable[tuple[int, int]]) -> None:
        self._builder, self._like = builder, like
        nothing = ir.Constant(like.vector, [0.0] * like.lanes)
        self._places = {each: cgutils.alloca_once(builder, like.vector) for each in where}
        for place in self._places.values():
            builder.store(nothing, place)

    def add(self, i: int, factor: Any, vectors: Sequence[Any]) -> None:
        """Add to row i the products of a vector with one vector for each column that the row has."""
        kind = self._like.vector
        for j, vector in enumerate(vectors):
            if (i, j) in self._places:
                so_far = self._builder.load(self._places[i, j], typ=kind)
                total = self._like.call("fmuladd", kind, factor, vector, so_far)
                self._builder.store(total, self._places[i, j])

    def vectors(self) -> dict[tuple[int, int], Any]:
        """Return the sums, by row and column."""
        kind = self._like.vector
        return {where: self._builder.load(place, typ=kind) for where, place in self._places.items()}


def _signature(matrices: Sequence[Any], write: Callable[..., None], lanes: int | None) -> tuple[Any, Any]:
    """Return the type of a function of ``matrices`` and four numbers, and its builder.

    ``write(builder, *matrices, *numbers)`` writes its code, for vectors of ``lanes`` or the machine's width.
    The last matrix is its result.
    """
    fine = all(m.ndim == 2 and m.layout == "C" and isinstance(m.dtype, types.Float) for m in matrices)
    if not fine or len({m.dtype for m in matrices}) > 1 or not matrices[-1].mutable:
        raise TypingError(f"these are not matrices of one type of floats in C order: {tuple(matrices)}")
    count = len(matrices)

    def built(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = zip(signature.args[:count], arguments[:count], strict=True)
        operands = [_Matrix(context, builder, kind, value, lanes) for kind, value in kinds]
        write(builder, *operands, *arguments[count:])
        return context.get_dummy_value()

    return types.void(*matrices, *[types.intp] * 4), built


def _vectorised(write: Callable[..., None], lanes: int | None = None) -> Any:
    """Return a function for compiled code, of three matrices and four numbers: places and a depth."""

    def declared(_: Any, left: Any, right: Any, out: Any, k: Any, t: Any, i: Any, depth: Any) -> Any:
        return _signature((left, right, out), write, lanes)

    return intrinsic(declared)


def _vectorised_about(write: Callable[..., None]) -> Any:
    """Return the same for four matrices; the third has a point that is subtracted from the second."""

    def declared(_: Any, w: Any, x: Any, point: Any, out: Any, k: Any, f: Any, i: Any, depth: Any) -> Any:
        return _signature((w, x, point, out), write, None)

    return intrinsic(declared)


def _product(
    builder: Any,
    shape: tuple[int, int],
    place: Callable[..., Any],
    a: _Matrix,
    load: Callable[[Any, int], Any],
    depth: Any,
) -> dict[tuple[int, int], Any]:
    """Return ``Σ_j a[place(j, row)] * load(j, column)``, vectors, over j < depth, for each row and column."""
    rows, columns = shape
    sums = _Sums(builder, a, product(range(rows), range(columns)))
    with cgutils.for_range(builder, depth, intp=INDEX) as along:
        vectors = [load(along.index, column) for column in range(columns)]
        for row in range(rows):
            sums.add(row, a.repeated(place(along.index, row)), vectors)
    return sums.vectors()


def _multiply_some(rows: int, columns: int = COLUMNS) -> Any:
    """Return a step: ``out[i:, t:] = left[k : k + rows, :depth] @ right[:depth, t : t + vectors]``."""

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, t: Any, i: Any, depth: Any) -> None:
        def load(j: Any, column: int) -> Any:
            return b.load(b.place(j, t, 0, column))

        sums = _product(builder, (rows, columns), lambda j, row: a.place(k, j, row), a, load, depth)
        for (row, column), vector in sums.items():
            c.store(vector, c.place(i, t, row, column))

    return _vectorised(write)


def _subtract_some(rows: int) -> Any:
    """Return a step that subtracts half the squares of such a product, summed over rows, from out[i].

    The last row of ``left`` is subtracted from the columns of ``right`` before. The last ``rows`` columns of
    the factor are 0 above their diagonal, and not read there.
    """

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, t: Any, i: Any, depth: Any) -> None:
        last = builder.sub(a.height, INDEX(1))
        sums = _Sums(builder, a, product(range(rows), range(COLUMNS)))

        def add(j: Any, first: int) -> None:
            point = a.repeated(a.place(last, j))
            vectors = [builder.fsub(b.load(b.place(j, t, 0, column)), point) for column in range(COLUMNS)]
            for row in range(first, rows):
                sums.add(row, a.repeated(a.place(k, j, row)), vectors)

        whole = builder.sub(depth, INDEX(rows))
        with cgutils.for_range(builder, whole, intp=INDEX) as along:
            add(along.index, 0)
        for beyond in range(rows):
            add(builder.add(whole, INDEX(beyond)), beyond)
        products, minus_half = sums.vectors(), ir.Constant(c.vector, [-0.5] * c.lanes)
        for column in range(COLUMNS):
            total = ir.Constant(c.vector, [0.0] * c.lanes)
            for row in range(rows):
                total = c.call("fmuladd", c.vector, products[row, column], products[row, column], total)
            place = c.place(i, t, 0, column)
            c.store(c.call("fmuladd", c.vector, total, minus_half, c.load(place)), place)

    return _vectorised(write)


def _multiply_some_transposed(rows: int, columns: int) -> Any:
    """Return a step: ``out[k:, i:] = left[k : k + rows, :depth] @ right[f : f + columns, :depth].T``."""

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, f: Any, i: Any, depth: Any) -> None:
        sums = _Sums(builder, a, product(range(rows), range(columns)))
        ends = INDEX(0), depth, INDEX(a.lanes)
        with cgutils.for_range_slice(builder, *ends, intp=INDEX) as (t, _):
            vectors = [b.load(b.place(f, t, column)) for column in range(columns)]
            for row in range(rows):
                sums.add(row, a.load(a.place(k, t, row)), vectors)
        _store_totals(builder, sums, c, k, i)

    return _vectorised(write)


def _store_totals(builder: Any, sums: _Sums, out: _Matrix, row: Any, column: Any) -> None:
    """Write the total of each vector of the sums into ``out[row:, column:]``."""
    nothing = ir.Constant(out.element, 0.0)
    for (i, j), vector in sums.vectors().items():
        total = out.call("vector.reduce.fadd", out.element, nothing, vector, fastmath=("reassoc",))
        builder.store(total, out.place(row, builder.add(column, INDEX(j)), i))


def _means(builder: Any, m: _Matrix, first: Any, count: int) -> list[Any]:
    """Return vectors of each of ``m[0, first : first + count]``."""
    places = (builder.add(first, INDEX(beyond)) for beyond in range(count))
    return [m.repeated(m.place(INDEX(0), place)) for place in places]


def _less(builder: Any, x: _Matrix, first: Any, t: Any, means: list[Any]) -> list[Any]:
    """Return the vectors at column t of the rows of x from ``first`` on, minus their means."""
    return [builder.fsub(x.load(x.place(first, t, j)), mean) for j, mean in enumerate(means)]


def _write_scatter(builder: Any, w: _Matrix, x: _Matrix, m: _Matrix, c: _Matrix, *places: Any) -> None:
    """Write ``Σ_t w[k, t] (x - m)[f : f + 4, t] (x - m)[i : i + 3, t]`` over t < depth into out[f:, i:].

    The column m is the first row of its matrix; the places are k, f, i and the depth.
    """
    k, f, i, depth = places
    sums = _Sums(builder, x, product(range(ROWS), range(COLUMNS)))
    of_rows, of_columns = _means(builder, m, f, ROWS), _means(builder, m, i, COLUMNS)
    ends = INDEX(0), depth, INDEX(x.lanes)
    with cgutils.for_range_slice(builder, *ends, intp=INDEX) as (t, _):
        vectors, weights = _less(builder, x, i, t, of_columns), w.load(w.place(k, t))
        for row, difference in enumerate(_less(builder, x, f, t, of_rows)):
            sums.add(row, builder.fmul(weights, difference), vectors)
    _store_totals(builder, sums, c, f, i)


def _write_own_scatter(builder: Any, w: _Matrix, x: _Matrix, m: _Matrix, c: _Matrix, *places: Any) -> None:
    """Write the same of rows f to f + 3 with themselves, on and above the diagonal.

    Then write ``Σ_t w[k, t] (x - m)[f : f + 4, t]`` into ``out[f : f + 4, i]``.
    """
    k, f, i, depth = places
    upper = [(row, column) for row in range(ROWS) for column in range(row, ROWS)]
    squares, sums = _Sums(builder, x, upper), _Sums(builder, x, [(row, 0) for row in range(ROWS)])
    means, one = _means(builder, m, f, ROWS), ir.Constant(x.vector, [1.0] * x.lanes)
    ends = INDEX(0), depth, INDEX(x.lanes)
    with cgutils.for_range_slice(builder, *ends, intp=INDEX) as (t, _):
        differences, weights = _less(builder, x, f, t, means), w.load(w.place(k, t))
        for row, difference in enumerate(differences):
            weighted = builder.fmul(weights, difference)
            squares.add(row, weighted, differences)
            sums.add(row, weighted, [one])
    _store_totals(builder, squares, c, f, f)
    _store_totals(builder, sums, c, f, i)


def _square_some(columns: int) -> Any:
    """Return a step: ``out[i:, t:] += left[:depth, k : k + 4].T @ right[:depth, t : t + vectors]``."""

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, t: Any, i: Any, depth: Any) -> None:
        def place(j: Any, row: int) -> Any:
            return a.place(j, builder.add(k, INDEX(row)))

        def load(j: Any, column: int) -> Any:
            return b.load(b.place(j, t, 0, column))

        for (row, column), vector in _product(builder, (ROWS, columns), place, a, load, depth).items():
            where = c.place(i, t, row, column)
            c.store(builder.fadd(c.load(where), vector), where)

    return _vectorised(write)


def _lanewise(compute: Callable[..., Any]) -> Any:
    """Return a step that computes the vector out[i, t:] from left[k, t:], right[j, t:] and itself."""

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, t: Any, i: Any, j: Any) -> None:
        into = c.place(i, t)
        vectors = a.load(a.place(k, t)), b.load(b.place(j, t)), c.load(into)
        c.store(compute(builder, *vectors), into)

    return _vectorised(write)


def _transpose(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, t: Any, f: Any, i: Any, row: Any) -> None:
    """Write ``(left[t : t + 4, f : f + 4] - right[row, f : f + 4]).T`` into ``out[i : i + 4, t : t + 4]``."""
    centre = b.load(b.place(row, f))
    one, two, three, four = (builder.fsub(a.load(a.place(t, f, beyond)), centre) for beyond in range(SIDE))
    for begin, pairs in enumerate(([0, 4, 2, 6], [1, 5, 3, 7])):
        first, last = a.mixed(one, two, pairs), a.mixed(three, four, pairs)
        c.store(a.mixed(first, last, [0, 1, 4, 5]), c.place(i, t, begin))
        c.store(a.mixed(first, last, [2, 3, 6, 7]), c.place(i, t, begin + 2))


transpose_four = _vectorised(_transpose, SIDE)
multiply_one, multiply_two, multiply_three, multiply_four = map(_multiply_some, range(1, ROWS + 1))
multiply_row = _multiply_some(1, columns=1)
one_by_one = _multiply_some_transposed(1, 1)
one_by_three, two_by_three, three_by_three, four_by_three = (
    _multiply_some_transposed(rows, COLUMNS) for rows in range(1, ROWS + 1)
)
subtract_one, subtract_two, subtract_three, subtract_four = map(_subtract_some, range(1, ROWS + 1))
scatter_some, scatter_own = map(_vectorised_about, (_write_scatter, _write_own_scatter))
square_one, square_two, square_three = (_square_some(columns) for columns in range(1, COLUMNS + 1))
copy_lanes = _lanewise(lambda builder, a, b, c: a)
add_lanes = _lanewise(lambda builder, a, b, c: builder.fadd(a, b))
multiply_lanes = _lanewise(lambda builder, a, b, c: builder.fmul(a, b))
divide_lanes = _lanewise(lambda builder, a, b, c: builder.fdiv(a, b))
add_product = _lanewise(
    lambda builder, a, b, c: builder.fadd(c, builder.fmul(a, b, flags=("contract",)), flags=("contract",))
)
subtract_product = _lanewise(
    lambda builder, a, b, c: builder.fsub(c, builder.fmul(a, b, flags=("contract",)), flags=("contract",))
)
