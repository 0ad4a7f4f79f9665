"""Read the imports of every file, and draw docs/figures/architecture.svg: python scripts/architecture.py.

tests/test_architecture.py compares the imports, docs/ARCHITECTURE.md and the drawing with each other.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {"ds_vrgd": ROOT, "ds_vrgd_recipes": ROOT / "recipes"}
DRAWING = ROOT / "docs" / "figures" / "architecture.svg"

#: Parts of each distribution, floor by floor. An import leads to a lower floor.
FLOORS: dict[str, list[list[str]]] = {
    "ds_vrgd_recipes": [["cli"], ["preflight", "bert", "clicks", "vision"], ["run"], ["installed", "__init__"]],
    "ds_vrgd": [
        ["cli", "__main__"],
        ["doctor", "hf"],
        ["__init__", "megatron"],
        ["engines", "noise"],
        ["optim"],
        ["moments", "gsnr"],
        ["kernels"],
        ["schedules", "extras", "moved", "manifest"],
    ],
}
#: Parts without imports that explain nothing: left out of the drawing.
APART = {
    "ds_vrgd": {"__main__", "megatron", "schedules", "extras", "moved"},
    "ds_vrgd_recipes": {"installed", "__init__"},
}


def modules(package: str) -> dict[str, Path]:
    """Return the file of every module of a package; a package's own name is its ``__init__.py``."""
    base = SOURCES[package]
    names = {path: ".".join(path.relative_to(base).with_suffix("").parts) for path in (base / package).rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in sorted(names.items())}


def imported(file: Path, known: Set[str]) -> Iterator[tuple[str, bool]]:
    """Yield every module that a file imports, and whether the import happens when the file is loaded.

    Imports inside functions and under ``TYPE_CHECKING`` count too. ``from package import name`` is the module
    ``package.name`` where that is a known one.
    """
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_text(encoding="utf-8")), True)]
    while nodes:
        node, at_once = nodes.pop()
        if isinstance(node, ast.Import):
            yield from ((name.name, at_once) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: a relative import"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield (full if full in known else str(node.module)), at_once
        at_once = at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        nodes += ((child, at_once) for child in ast.iter_child_nodes(node))


@functools.cache
def imports(package: str) -> list[tuple[str, str, bool]]:
    """Return (module, imported module, whether the import happens at loading) for every import of a package."""
    files = modules(package)
    return [(name, *found) for name, file in files.items() for found in imported(file, files.keys())]


def graph(package: str) -> dict[str, set[str]]:
    """Return the modules of the same package that each module imports."""
    arrows: dict[str, set[str]] = {name: set() for name in modules(package)}
    for module, target, _ in imports(package):
        if target in arrows and target != module:
            arrows[module].add(target)
    return arrows


def circles(arrows: Mapping[str, Set[str]]) -> list[set[str]]:
    """Return the sets of nodes that all reach each other, of two nodes or more."""
    reached = {node: reachable(arrows, node) for node in arrows}
    found: list[set[str]] = []
    for node in arrows:
        circle = {other for other in reached[node] if node in reached[other]}
        if node in circle and circle not in found:
            found.append(circle)
    return found


def reachable(arrows: Mapping[str, Set[str]], start: str) -> set[str]:
    """Return all nodes that one arrow or several lead to."""
    found: set[str] = set()
    todo = list(arrows[start])
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += arrows[node]
    return found


def part_of(module: str) -> str:
    """Return the part of its distribution that a module is in; ``__init__`` for the names at the top."""
    return module.split(".")[1] if "." in module else "__init__"


def parts(package: str) -> dict[str, set[str]]:
    """Return the parts of a package that each part imports."""
    arrows: dict[str, set[str]] = {}
    for name, targets in graph(package).items():
        arrows.setdefault(part_of(name), set()).update(map(part_of, targets))
    return {part: targets - {part} for part, targets in arrows.items()}


def shortest(arrows: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """Leave out every arrow between two nodes that a longer path connects."""
    return {
        node: {each for each in targets if not any(each in reachable(arrows, other) for other in targets - {each})}
        for node, targets in arrows.items()
    }


WIDTH, HEIGHT, GAP, COLUMN, LEFT = 104, 34, 30, 500, 16
OUTSIDE = 'fill="#7d7d7d"'  # of text and lines outside of boxes, on white and on dark pages
COLOURS = {"engines": "#fdf1dc", "ds_vrgd_recipes": "#e8f0fb"}


def draw() -> str:
    """Return the drawing: both distributions, a box per part, an arrow per import that no longer path replaces."""
    boxes: list[str] = []
    lines: list[str] = []
    bottom = 0
    for column, (package, floors) in enumerate(FLOORS.items()):
        apart = APART[package]
        arrows = {part: targets - apart for part, targets in parts(package).items() if part not in apart}
        shown = [[part for part in floor if part in arrows] for floor in floors]
        place = _places([floor for floor in shown if floor], LEFT + column * COLUMN)
        boxes.append(_text(LEFT + column * COLUMN + COLUMN / 2 - 20, 22, package, f'{OUTSIDE} font-weight="bold"'))
        for part, (x, y) in place.items():
            fill = COLOURS.get(part, COLOURS.get(package, "#e7f5e8"))
            size = f'width="{WIDTH}" height="{HEIGHT}"'
            boxes.append(f'<rect x="{x}" y="{y}" {size} rx="5" fill="{fill}" stroke="#666"/>')
            boxes.append(_text(x + WIDTH / 2, y + 22, "public names" if part == "__init__" else part))
            bottom = max(bottom, y + HEIGHT)
        for part, targets in sorted(shortest(arrows).items()):
            lines += [_line(place[part], place[target]) for target in sorted(targets)]
    lines.append(f'<path d="M{COLUMN - 36} 19H{COLUMN + 150}" marker-end="url(#a)"/>')
    size = f'viewBox="0 0 {2 * COLUMN} {bottom + 16}"'
    label = "The parts of ds_vrgd_recipes and ds_vrgd; every import points down, or from the recipes to the wheel"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14" role="img"'
    marker = '<marker id="a" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            f'{head} aria-label="{label}">',
            f'<defs>{marker}<path d="M0 0L10 5L0 10z" fill="#7d7d7d"/></marker></defs>',
            '<g stroke="#7d7d7d" stroke-width="1.3" fill="none">',
            *lines,
            "</g>",
            *boxes,
            "</svg>\n",
        ]
    )


def _places(floors: Sequence[Sequence[str]], left: int) -> dict[str, tuple[int, int]]:
    """Return the upper left corner of each box, floors centred."""
    found = {}
    for level, floor in enumerate(floors):
        used = len(floor) * WIDTH + (len(floor) - 1) * 16
        for i, part in enumerate(floor):
            found[part] = (left + (COLUMN - 40 - used) // 2 + i * (WIDTH + 16), 40 + level * (HEIGHT + GAP))
    return found


def _line(start: tuple[int, int], end: tuple[int, int]) -> str:
    return (
        f'<path d="M{start[0] + WIDTH // 2} {start[1] + HEIGHT}L{end[0] + WIDTH // 2} {end[1]}" marker-end="url(#a)"/>'
    )


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="middle" {style}>{text}</text>'.replace(" >", ">")


if __name__ == "__main__":
    DRAWING.write_text(draw(), encoding="utf-8")
    print(DRAWING.relative_to(ROOT), file=sys.stderr)
