"""Draws `docs/architecture.svg`: the folders of the package and their imports, read from its code.

Run it after a change of the folders, of their imports, or of the first words of their docstrings:

    python docs/draw_architecture.py
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from itertools import combinations, pairwise, permutations
from pathlib import Path
from textwrap import wrap

DOCS = Path(__file__).parent
PACKAGE = DOCS.parent / "emtau_dask"
PICTURE = DOCS / "architecture.svg"

Edges = Mapping[str, frozenset[str]]
"""The folders that each folder imports."""

WIDTH, PADDING, GAP, ROW_GAP = 178, 10, 18, 30
"""Of a box without inner boxes; between a box and what is in it; between boxes of a row; between rows."""
TITLE, LINE, LETTERS = 17, 14, 26
"""Heights of a name and of a line of text, and the letters of a line."""
BAR_LETTERS = 60
"""Of a line of the names of modules beside the folders."""
ORDERINGS, SHIFTS = 8, 300
"""Rounds of the search for the order and for the places of boxes, after which nothing moves."""
STRAIGHT = 8
"""How much more than others the links of an edge that crosses a row pull at each other."""

Point = tuple[float, float]


def folders(package: Path) -> dict[str, str]:
    """Return the folders by dotted name, each with the beginning of its docstring."""
    found = {}
    for path in sorted(package.rglob("__init__.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for end in ".:;":
            said = said.partition(f"{end} ")[0].rstrip(end)
        found[".".join(path.parent.relative_to(package).parts)] = said.replace("`", "")
    del found[""]
    return found


def imported(path: Path, package: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports of the package, without the package's own."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name.partition(".")[2] for name in names if name.startswith(f"{package.name}."))


def imports(package: Path, names: Mapping[str, str]) -> Edges:
    """Return which folders each folder imports; one inside another folder stands for itself."""
    edges: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        for path in sorted((package / name.replace(".", "/")).glob("*.py")):
            for found in imported(path, package):
                while found and found not in names:
                    found = found.rpartition(".")[0]
                edges[name] |= {found} - {name, ""}
    return {name: frozenset(others) for name, others in edges.items()}


def among(edges: Edges, parent: str) -> Edges:
    """Return the edges among the folders directly in ``parent``, what is inside them taken together."""
    depth = len(parent.split(".")) if parent else 0
    prefix = f"{parent}." if parent else ""

    def child(name: str) -> str:
        return ".".join(name.split(".")[: depth + 1])

    found: dict[str, set[str]] = {child(name): set() for name in edges if name.startswith(prefix)}
    for name, others in edges.items():
        if name.startswith(prefix):
            found[child(name)] |= {child(other) for other in others if other.startswith(prefix)}
    return {name: frozenset(others - {name}) for name, others in found.items()}


def below(edges: Edges, name: str) -> frozenset[str]:
    """Return all that ``name`` imports, directly or through others."""
    return edges[name].union(*(below(edges, other) for other in edges[name]))


def without_implied(edges: Edges) -> Edges:
    """Return the edges without those that a path of other edges implies."""
    return {
        name: frozenset(
            other for other in others if not any(other in below(edges, via) for via in others - {other})
        )
        for name, others in edges.items()
    }


@dataclass(frozen=True)
class Box:
    """A folder as drawn; ``x`` and ``y`` are those of its top left corner, within what it lies in."""

    name: str
    text: tuple[str, ...]
    width: float
    height: float
    inner: Drawing | None
    x: float = 0.0
    y: float = 0.0


@dataclass(frozen=True)
class Drawing:
    """Boxes, and arrows through the points of each."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    arrows: tuple[tuple[Point, ...], ...]


def rows_of(edges: Edges) -> tuple[list[list[str]], dict[tuple[str, str], list[str]]]:
    """Return the rows from the bottom up, and the names on the way of each edge from its top.

    Where an edge crosses a row, the row has a place for it, named after the edge.
    """
    height: dict[str, int] = {}

    def measure(name: str) -> int:
        if name not in height:
            height[name] = 1 + max((measure(other) for other in edges[name]), default=-1)
        return height[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(measure, sorted(edges))))]
    for name in sorted(edges):
        rows[height[name]].append(name)
    ways = {}
    for name in sorted(edges):
        for other in sorted(edges[name]):
            crossed = range(height[name] - 1, height[other], -1)
            places = [f"{name}>{other}@{row}" for row in crossed]
            for row, place in zip(crossed, places, strict=True):
                rows[row].append(place)
            ways[name, other] = [name, *places, other]
    return rows, ways


def crossings(upper: list[str], lower: list[str], links: set[tuple[str, str]]) -> int:
    """Return how many pairs of links between two rows cross."""
    ends = [(upper.index(a), lower.index(b)) for a, b in links if a in upper and b in lower]
    return sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(ends, 2))


def untangled(rows: list[list[str]], links: set[tuple[str, str]]) -> list[list[str]]:
    """Return the rows in an order with few crossings: each row in turn in its best order."""
    rows = [list(row) for row in rows]
    for _ in range(ORDERINGS):
        for i in range(len(rows)):

            def tangle(order: tuple[str, ...], i: int = i) -> int:
                above = crossings(rows[i + 1], list(order), links) if i + 1 < len(rows) else 0
                return above + (crossings(list(order), rows[i - 1], links) if i else 0)

            rows[i] = list(min(permutations(rows[i]), key=tangle))
    return rows


def centres(
    rows: list[list[str]], links: set[tuple[str, str]], widths: Mapping[str, float]
) -> dict[str, float]:
    """Return where the middle of each place is: near those that it is linked to, none over another."""
    x = {name: 0.0 for row in rows for name in row}
    linked: dict[str, list[str]] = {name: [] for name in x}
    for a, b in sorted(links):
        pull = STRAIGHT if not widths[a] and not widths[b] else 1
        linked[a] += [b] * pull
        linked[b] += [a] * pull
    for _ in range(SHIFTS):
        for row in [*rows, *reversed(rows)]:
            wanted = {
                name: sum(x[o] for o in linked[name]) / len(linked[name]) if linked[name] else 0.0
                for name in row
            }
            for i, name in enumerate(row):
                free = x[row[i - 1]] + (widths[row[i - 1]] + widths[name]) / 2 + GAP if i else -1e9
                x[name] = max(wanted[name], free)
            shift = sum(x[name] - wanted[name] for name in row) / len(row)
            for name in row:
                x[name] -= shift
    left = min(x[name] - widths[name] / 2 for name in x)
    return {name: value - left for name, value in x.items()}


def box(name: str, names: Mapping[str, str], edges: Edges) -> Box:
    """Return the box of a folder, with the folders in it."""
    inside = among(edges, name)
    text = tuple(wrap(names[name], LETTERS))
    if not inside:
        return Box(name, text, WIDTH, TITLE + LINE * len(text) + 2 * PADDING, None)
    inner = arranged(inside, names, edges)
    width = inner.width + 2 * PADDING
    text = tuple(wrap(names[name], int(LETTERS * width / WIDTH)))
    height = inner.height + TITLE + LINE * len(text) + 3 * PADDING
    return Box(name, text, width, height, inner)


def ports(
    ways: Mapping[tuple[str, str], list[str]], x: Mapping[str, float], boxes: Mapping[str, Box]
) -> dict:
    """Return where edges leave and reach their boxes: spread over the middle, in the order of their ways."""
    found: dict[tuple[tuple[str, str], str], float] = {}
    for name in sorted(boxes):
        for end, following in ((0, 1), (-1, -2)):
            edges = [edge for edge, way in sorted(ways.items()) if way[end] == name]
            edges.sort(key=lambda edge: x[ways[edge][following]])
            step = min(24.0, boxes[name].width / (len(edges) + 1))
            for i, edge in enumerate(edges):
                found[edge, name] = x[name] + (i - (len(edges) - 1) / 2) * step
    return found


def arranged(edges: Edges, names: Mapping[str, str], all_edges: Edges) -> Drawing:
    """Return the folders in rows: each above all that it imports."""
    rows, ways = rows_of(without_implied(edges))
    links = {link for way in ways.values() for link in pairwise(way)}
    rows = untangled(rows, links)
    boxes = {name: box(name, names, all_edges) for name in sorted(edges)}
    widths = {name: boxes[name].width if name in boxes else 0.0 for row in rows for name in row}
    x = centres(rows, links, widths)
    tops, bottoms, y = {}, {}, 0.0
    for row in reversed(rows):
        height = max(boxes[name].height for name in row if name in boxes)
        for name in row:
            tops[name] = y
            bottoms[name] = y + (boxes[name].height if name in boxes else height)
        y += height + ROW_GAP
    placed = [
        Box(b.name, b.text, b.width, b.height, b.inner, x[name] - b.width / 2, tops[name])
        for name, b in boxes.items()
    ]
    at, arrows = ports(ways, x, boxes), []
    for edge, way in ways.items():
        first, last = at[edge, way[0]], at[edge, way[-1]]
        points = [(first, bottoms[way[0]])]
        for name in way[1:-1]:
            points += [(x[name], tops[name]), (x[name], bottoms[name])]
        arrows.append((*points, (last, tops[way[-1]])))
    width = max(x[name] + widths[name] / 2 for name in x)
    return Drawing(width, y - ROW_GAP, tuple(placed), tuple(arrows))


def drawn(drawing: Drawing, left: float, top: float) -> Iterator[str]:
    """Yield the elements of a drawing whose top left corner is there."""
    for b in drawing.boxes:
        x, y = left + b.x, top + b.y
        kind = "folder" if b.inner is None else "group"
        yield f'<rect class="{kind}" x="{x:.0f}" y="{y:.0f}" width="{b.width:.0f}" height="{b.height:.0f}"/>'
        middle, line = x + b.width / 2, y + PADDING + 13
        yield f'<text class="name" x="{middle:.0f}" y="{line:.0f}">{escape(b.name)}</text>'
        for i, text in enumerate(b.text):
            at = line + TITLE + i * LINE
            yield f'<text x="{middle:.0f}" y="{at:.0f}">{escape(text)}</text>'
        if b.inner is not None:
            yield from drawn(b.inner, x + PADDING, y + b.height - PADDING - b.inner.height)
    for arrow in drawing.arrows:
        points = [(left + x, top + y) for x, y in arrow]
        path = "M{:.0f},{:.0f}".format(*points[0])
        for (a, b_), (c, d) in pairwise(points):
            path += f" C{a:.0f},{(b_ + d) / 2:.0f} {c:.0f},{(b_ + d) / 2:.0f} {c:.0f},{d:.0f}"
        yield f'<path class="import" d="{path}"/>'


STYLE = """
text { font: 12px Helvetica, Arial, "DejaVu Sans", sans-serif; text-anchor: middle; fill: #333 }
.name { font-size: 15px; font-weight: bold; fill: #111 }
.folder { fill: #fff; stroke: #567; rx: 5 }
.group { fill: #eef3f8; stroke: #567; rx: 5 }
.import { fill: none; stroke: #456; stroke-width: 1.3; marker-end: url(#head) }
"""
HEAD = """<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"
 orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#456"/></marker>"""


def picture(package: Path = PACKAGE) -> str:
    """Return the SVG document for the package as it is."""
    names = folders(package)
    edges = imports(package, names)
    whole = arranged(among(edges, ""), names, edges)
    beside = wrap(" · ".join(sorted(path.stem for path in package.glob("[!_]*.py"))), BAR_LETTERS)
    width, bar = whole.width + 2 * GAP, TITLE * len(beside) + LINE + 2 * PADDING
    top = GAP + whole.height + ROW_GAP / 2
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {top + bar + GAP:.0f}"'
        f' width="{width:.0f}" height="{top + bar + GAP:.0f}">',
        f"<title>The folders of {package.name}</title>",
        f"<style>{STYLE}</style>",
        f"<defs>{HEAD}</defs>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        *drawn(whole, GAP, GAP),
        f'<rect class="group" x="{GAP}" y="{top:.0f}" width="{whole.width:.0f}" height="{bar}"/>',
        *(
            f'<text class="name" x="{width / 2:.0f}" y="{top + PADDING + 13 + TITLE * i:.0f}">{names}</text>'
            for i, names in enumerate(beside)
        ),
        f'<text x="{width / 2:.0f}" y="{top + PADDING + 13 + TITLE * len(beside):.0f}">'
        "modules beside the folders</text>",
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
