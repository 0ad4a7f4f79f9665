"""docs/ARCHITECTURE.md tells every import between rooms, and each points down."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ds_vrgd"
ROW = re.compile(r"^\| `(\w+)` \|.*\|([^|]*)\|$", re.MULTILINE)


def written() -> dict[str, set[str]]:
    """Room -> rooms that it imports, from the top down."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    return {room: set(re.findall(r"`(\w+)`", cell)) for room, cell in ROW.findall(page)}


def rooms() -> set[str]:
    found = {path.stem for path in (ROOT / PACKAGE).iterdir() if path.is_dir() or path.suffix == ".py"}
    return found - {"__init__", "__pycache__"} | {PACKAGE}


def imported(file: Path) -> Iterator[str]:
    """Modules that a file imports when it runs, early or late."""
    nodes: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            yield from (f"{PACKAGE}.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def actual() -> dict[str, set[str]]:
    arrows: dict[str, set[str]] = {room: set() for room in rooms()}
    for file in (ROOT / PACKAGE).rglob("*.py"):
        place = file.relative_to(ROOT / PACKAGE).parts[0].removesuffix(".py")
        room = PACKAGE if place == "__init__" else place
        for module in imported(file):
            package, _, rest = module.partition(".")
            if package == PACKAGE:
                target = rest.partition(".")[0]
                arrows[room].add(target if target in arrows else PACKAGE)
    return {room: targets - {room} for room, targets in arrows.items()}


def test_the_page_has_every_room_and_every_arrow() -> None:
    assert written() == actual()


def test_every_arrow_points_down() -> None:
    order = list(written())
    back = [
        f"{room} -> {target}"
        for room, targets in actual().items()
        for target in targets
        if target not in order[order.index(room) + 1 :]
    ]
    assert not back, f"imports that point up: {', '.join(sorted(back))}"
