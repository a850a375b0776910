"""Products of few rows with a tile that lies in the core's own cache, in vectors of the machine's width.

A BLAS packs its factors before it multiplies them, which takes as long as multiplying them by few rows.
A tile needs no packing: its rows are whole vectors, and they are in the cache. The sums for four rows of one
factor by three vectors, or rows, of the other stay in registers while one loop passes along the dimension
that both share (Goto and van de Geijn 2008, "Anatomy of high-performance matrix multiplication", section 4).
So do the squares of such sums, and rows while they are transposed.
Functions raise ValueError where shapes do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.core.errors import TypingError
from numba.extending import intrinsic

OPTIONS: dict[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy", "fastmath": {"contract"}}
WITHIN: dict[str, Any] = OPTIONS | {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
ROWS, COLUMNS = 4, 3
"""Of the sums that are in registers: these 12 vectors and 4 others are as many as most machines have. Each
number of rows up to 4, or of vectors up to 3, has a function of its own."""
WIDTHS = (("+avx512f", 64), ("+avx", 32))
SIDE = 4
"""Rows and features that are transposed at a time."""
INDEX = ir.IntType(64)


def _digest() -> str:
    """Return a digest of the modules of compiled loops; nothing where they are not files."""
    found = sha256()
    with suppress(OSError):
        for path in sorted(Path(__file__).parent.glob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]


VERSION = _digest()
"""Part of the names under which numba keeps what it compiled: it looks at a function's own file alone, and
cannot read what it kept with types that have gone."""


def loop(function: Any, **options: Any) -> Any:
    """Compile a function at its first call, and keep the result on disk where numba finds a place for it."""
    function.__qualname__ += f"-{VERSION}"
    try:
        return njit(**OPTIONS | options, cache=True)(function)
    except RuntimeError:
        return njit(**OPTIONS | options)(function)


inlined = partial(loop, inline="always")
"""Compiles a function as a part of those that call it, since numba would optimise it by itself as well."""
sum_loop = partial(loop, fastmath={"contract", "reassoc"})
"""Compiles a function that adds in any order."""


def _vector_bytes() -> int:
    """Return the width of the vectors that numba compiles for."""
    features = get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return next((width for feature, width in WIDTHS if feature in features.split(",")), 16)


VECTOR_BYTES = _vector_bytes()


class _Matrix:
    """A matrix in C order, as code that is being built sees it."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any, lanes: int | None) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.itemsize = kind.dtype.bitwidth // 8
        self.lanes = lanes or VECTOR_BYTES // self.itemsize
        self.element = ir.DoubleType() if self.itemsize == 8 else ir.FloatType()
        self.vector = ir.VectorType(self.element, self.lanes)
        self.height, self.width = (builder.extract_value(array.shape, axis) for axis in (0, 1))
        self._builder, self._data = builder, array.data

    def place(self, row: Any, column: Any, rows_on: int = 0, vectors_on: int = 0) -> Any:
        """Return the place of a number, so many rows and vectors on."""
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
        """Return a vector of nothing but the number at a place."""
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
        """Return what LLVM's function of this name for such vectors returns."""
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
    """Return the type of a function of ``matrices`` and four numbers, and what builds it.

    ``write(builder, *matrices, *numbers)`` writes its code, for vectors of ``lanes`` or the machine's width.
    The last matrix is its result.
    """
    fine = all(m.ndim == 2 and m.layout == "C" and isinstance(m.dtype, types.Float) for m in matrices)
    if not fine or len({m.dtype for m in matrices}) > 1 or not matrices[-1].mutable:
        raise TypingError(f"these are not matrices of one type of floats in C order: {tuple(matrices)}")
    count = len(matrices)

    def built(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = zip(signature.args[:count], arguments[:count], strict=True)
        seen = [_Matrix(context, builder, kind, value, lanes) for kind, value in kinds]
        write(builder, *seen, *arguments[count:])
        return context.get_dummy_value()

    return types.void(*matrices, *[types.intp] * 4), built


def _vectorised(write: Callable[..., None], lanes: int | None = None) -> Any:
    """Return a function for compiled code, of three matrices and four numbers: places and a depth."""

    def declared(_: Any, left: Any, right: Any, out: Any, k: Any, t: Any, i: Any, depth: Any) -> Any:
        return _signature((left, right, out), write, lanes)

    return intrinsic(declared)


def _vectorised_about(write: Callable[..., None]) -> Any:
    """Return the same of four matrices, of which the third has a point that is subtracted from the second."""

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


def _multiply_some(rows: int) -> Any:
    """Return what writes ``left[k : k + rows, :depth] @ right[:depth, t : t + 3 vectors]`` to out[i:, t:]."""

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, t: Any, i: Any, depth: Any) -> None:
        def load(j: Any, column: int) -> Any:
            return b.load(b.place(j, t, 0, column))

        sums = _product(builder, (rows, COLUMNS), lambda j, row: a.place(k, j, row), a, load, depth)
        for (row, column), vector in sums.items():
            c.store(vector, c.place(i, t, row, column))

    return _vectorised(write)


def _subtract_some(rows: int) -> Any:
    """Return what subtracts half the squares of such a product, summed over its rows, from row i of out.

    The last row of ``left`` is subtracted from the columns of ``right`` before.
    """

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, t: Any, i: Any, depth: Any) -> None:
        last = builder.sub(a.height, INDEX(1))

        def load(j: Any, column: int) -> Any:
            return builder.fsub(b.load(b.place(j, t, 0, column)), a.repeated(a.place(last, j)))

        sums = _product(builder, (rows, COLUMNS), lambda j, row: a.place(k, j, row), a, load, depth)
        minus_half = ir.Constant(c.vector, [-0.5] * c.lanes)
        for column in range(COLUMNS):
            total = ir.Constant(c.vector, [0.0] * c.lanes)
            for row in range(rows):
                total = c.call("fmuladd", c.vector, sums[row, column], sums[row, column], total)
            place = c.place(i, t, 0, column)
            c.store(c.call("fmuladd", c.vector, total, minus_half, c.load(place)), place)

    return _vectorised(write)


def _multiply_some_transposed(rows: int, columns: int) -> Any:
    """Return what writes ``left[k : k + rows, :depth] @ right[f : f + columns, :depth].T`` to out[k:, i:]."""

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
    """Write what each vector of the sums adds up to into ``out[row:, column:]``."""
    nothing = ir.Constant(out.element, 0.0)
    for (i, j), vector in sums.vectors().items():
        total = out.call("vector.reduce.fadd", out.element, nothing, vector, fastmath=("reassoc",))
        builder.store(total, out.place(row, builder.add(column, INDEX(j)), i))


def _means(builder: Any, m: _Matrix, first: Any, count: int) -> list[Any]:
    """Return vectors of each of ``m[0, first : first + count]``."""
    places = (builder.add(first, INDEX(beyond)) for beyond in range(count))
    return [m.repeated(m.place(INDEX(0), place)) for place in places]


def _less(builder: Any, x: _Matrix, first: Any, t: Any, means: list[Any]) -> list[Any]:
    """Return the vectors at column t of so many rows of x from the first on, less their means."""
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
    """Return what adds ``left[:depth, k : k + 4].T @ right[:depth, t : t + vectors]`` to out[i:, t:]."""

    def write(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, k: Any, t: Any, i: Any, depth: Any) -> None:
        def place(j: Any, row: int) -> Any:
            return a.place(j, builder.add(k, INDEX(row)))

        def load(j: Any, column: int) -> Any:
            return b.load(b.place(j, t, 0, column))

        for (row, column), vector in _product(builder, (ROWS, columns), place, a, load, depth).items():
            where = c.place(i, t, row, column)
            c.store(builder.fadd(c.load(where), vector), where)

    return _vectorised(write)


def _transpose(builder: Any, a: _Matrix, b: _Matrix, c: _Matrix, t: Any, f: Any, i: Any, row: Any) -> None:
    """Write ``(left[t : t + 4, f : f + 4] - right[row, f : f + 4]).T`` into ``out[i : i + 4, t : t + 4]``."""
    centre = b.load(b.place(row, f))
    one, two, three, four = (builder.fsub(a.load(a.place(t, f, beyond)), centre) for beyond in range(SIDE))
    for begin, pairs in enumerate(([0, 4, 2, 6], [1, 5, 3, 7])):
        first, last = a.mixed(one, two, pairs), a.mixed(three, four, pairs)
        c.store(a.mixed(first, last, [0, 1, 4, 5]), c.place(i, t, begin))
        c.store(a.mixed(first, last, [2, 3, 6, 7]), c.place(i, t, begin + 2))


_transpose_four = _vectorised(_transpose, SIDE)
_one, _two, _three, _four = (_multiply_some(rows) for rows in range(1, 5))
_subtract_one, _subtract_two, _subtract_three, _subtract_four = (_subtract_some(rows) for rows in range(1, 5))
_one_by_one, _two_by_one, _three_by_one, _four_by_one = (
    _multiply_some_transposed(rows, 1) for rows in range(1, 5)
)
_one_by_three, _two_by_three, _three_by_three, _four_by_three = (
    _multiply_some_transposed(rows, COLUMNS) for rows in range(1, 5)
)
_scatter_some, _scatter_own = map(_vectorised_about, (_write_scatter, _write_own_scatter))
_square_one, _square_two, _square_three = (_square_some(columns) for columns in range(1, COLUMNS + 1))


def side_of(n_features: int, itemsize: int) -> int:
    """Return the least side for so many features that is a multiple of whole vectors and of four."""
    step = max(ROWS, VECTOR_BYTES // itemsize)
    return -(-n_features // step) * step


@loop
def subtract_transposed(rows: Any, origin: Any, out: Any) -> None:
    """Write ``(rows - origin).T``, of rows (n, d) and (1, d), into ``out[:d, :n]``."""
    n, d = rows.shape
    m, whole = n - n % SIDE, d - d % SIDE
    if origin.shape[0] != 1 or origin.shape[1] != d or d > len(out) or n > out.shape[1]:
        raise ValueError("rows, origin and result do not fit each other")
    for t in range(0, m, SIDE):
        for f in range(0, whole, SIDE):
            _transpose_four(rows, origin, out, t, f, f, 0)
    for f in range(d):
        of_feature, middle = out[f], origin[0, f]
        for t in range(m if f < whole else 0, n):
            of_feature[t] = rows[t, f] - middle


@loop
def multiply(left: Any, right: Any, out: Any) -> None:
    """Write ``left @ right``, of (m, F) and (F, T), into ``out`` (m, T).

    T numbers fill a multiple of `COLUMNS` cache lines.
    """
    m, step = len(left), COLUMNS * VECTOR_BYTES // right.itemsize
    depth, rest = len(right), m % ROWS
    k = m - rest
    if left.shape[1] != depth or len(out) != m or right.shape[1] != out.shape[1] or right.shape[1] % step:
        raise ValueError("factors and result do not fit each other, or vectors do not fit them")
    for t in range(0, right.shape[1], step):
        for row in range(0, k, ROWS):
            _four(left, right, out, row, t, row, depth)
        if rest == 1:
            _one(left, right, out, k, t, k, depth)
        elif rest == 2:
            _two(left, right, out, k, t, k, depth)
        elif rest == 3:
            _three(left, right, out, k, t, k, depth)


@loop
def subtract_half_squares(left: Any, right: Any, first: Any, out: Any) -> None:
    """Subtract from ``out[first]`` half the squared lengths of the columns of ``left[:m] @ (right - p)``.

    The column p is ``left[m]``. They are of shapes (m + 1, m), (m, T) and (K, T); T numbers fill a multiple
    of `COLUMNS` cache lines. Its first m rows are 0 above their diagonal; what is beyond the end of a
    group of four rows is not read.
    """
    m, step = len(right), COLUMNS * VECTOR_BYTES // right.itemsize
    rest = m % ROWS
    k = m - rest
    if left.shape[1] != m or len(left) != m + 1 or right.shape[1] % step:
        raise ValueError("the factors do not fit each other, or vectors do not fit them")
    if first < 0 or first >= len(out) or out.shape[1] != right.shape[1]:
        raise ValueError("the result does not fit the factors")
    for t in range(0, right.shape[1], step):
        for row in range(0, k, ROWS):
            _subtract_four(left, right, out, row, t, first, row + ROWS)
        if rest == 1:
            _subtract_one(left, right, out, k, t, first, m)
        elif rest == 2:
            _subtract_two(left, right, out, k, t, first, m)
        elif rest == 3:
            _subtract_three(left, right, out, k, t, first, m)


@inlined
def _three_columns(left: Any, right: Any, i: Any, depth: Any, out: Any) -> None:
    """Write ``left[:, :depth] @ right[i : i + 3, :depth].T`` into columns i to i + 2 of out."""
    rest = len(left) % ROWS
    k = len(left) - rest
    for row in range(0, k, ROWS):
        _four_by_three(left, right, out, row, i, i, depth)
    if rest == 1:
        _one_by_three(left, right, out, k, i, i, depth)
    elif rest == 2:
        _two_by_three(left, right, out, k, i, i, depth)
    elif rest == 3:
        _three_by_three(left, right, out, k, i, i, depth)


@inlined
def _one_column(left: Any, right: Any, i: Any, depth: Any, out: Any) -> None:
    """Write ``left[:, :depth] @ right[i, :depth]`` into column i of out."""
    rest = len(left) % ROWS
    k = len(left) - rest
    for row in range(0, k, ROWS):
        _four_by_one(left, right, out, row, i, i, depth)
    if rest == 1:
        _one_by_one(left, right, out, k, i, i, depth)
    elif rest == 2:
        _two_by_one(left, right, out, k, i, i, depth)
    elif rest == 3:
        _three_by_one(left, right, out, k, i, i, depth)


@loop
def multiply_transposed(left: Any, right: Any, out: Any) -> None:
    """Write ``left @ right[:n].T``, of (m, T) and at least (n, T), into ``out`` (m, n).

    T numbers fill a multiple of cache lines.
    """
    (m, n), depth = out.shape, left.shape[1]
    whole = n - n % COLUMNS
    if len(left) != m or right.shape[1] != depth or depth % (VECTOR_BYTES // right.itemsize):
        raise ValueError("factors and result do not fit each other, or vectors do not fit them")
    if n > len(right):
        raise ValueError("the second factor has too few rows")
    for i in range(0, whole, COLUMNS):
        _three_columns(left, right, i, depth, out)
    for i in range(whole, n):
        _one_column(left, right, i, depth, out)


@loop
def scatter(weights: Any, k: Any, coordinates: Any, mean: Any, d: Any, out: Any) -> None:
    """Write ``Σ_t weights[k, t] (x_i - m_i) (x_j - m_j)`` into ``out[i, j]``, for i <= j < d.

    Without the last factor, it is written into ``out[i, d]``. Weights are (K, T), coordinates x at least
    (d + 3, T), the mean m (1, at least d + 3), and the result has at least d + 3 rows and columns; what else
    there is of it is left undefined. T numbers fill a multiple of cache lines.
    """
    least, tile = d + COLUMNS, coordinates.shape[1]
    if k < 0 or k >= len(weights) or weights.shape[1] != tile or tile % (VECTOR_BYTES // weights.itemsize):
        raise ValueError("weights and coordinates do not fit each other, or vectors do not fit them")
    if d < 1 or min(len(coordinates), mean.shape[1], len(out), out.shape[1]) < least or len(mean) != 1:
        raise ValueError("coordinates, mean or result have too few rows or columns")
    for i in range(0, d, ROWS):
        for j in range(i + ROWS, d, COLUMNS):
            _scatter_some(weights, coordinates, mean, out, k, i, j, tile)
        _scatter_own(weights, coordinates, mean, out, k, i, d, tile)


@loop
def add_upper_squares(vectors: Any, depth: Any, out: Any) -> None:
    """Add ``vectors[:depth, :side].T @ vectors[:depth, :side]`` to ``out``, on and above its diagonal.

    Entries below the diagonal are left undefined. ``out`` is of shape (side, side), with a side from
    `side_of`; ``vectors`` have at least so many columns. They are best an odd number of cache lines apart,
    which spreads them over the nearest cache.
    """
    side, lanes = len(out), VECTOR_BYTES // vectors.itemsize
    if out.shape[1] != side or vectors.shape[1] < side or side % lanes or side % ROWS:
        raise ValueError("vectors and result do not fit each other, or the machine's vectors do not fit them")
    if depth < 0 or depth > len(vectors):
        raise ValueError("there are not so many vectors")
    step = COLUMNS * lanes
    for i in range(0, side, ROWS):
        first = i - i % lanes
        rest = (side - first) % step
        for t in range(first, side - rest, step):
            _square_three(vectors, vectors, out, i, t, i, depth)
        if rest == 2 * lanes:
            _square_two(vectors, vectors, out, i, side - rest, i, depth)
        elif rest == lanes:
            _square_one(vectors, vectors, out, i, side - rest, i, depth)
