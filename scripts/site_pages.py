"""Gather the pages of the site (`make docs`), with links that work as in the repository.

The README, docs/ and the other pages at the root become one flat folder. A link to a file that is not a page leads to
a copy of that file. A link to nothing, or a page that mkdocs.yml does not name, is an error.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The site would use a README as its folder's index.
RENAMED = {
    "README.md": "index.md",
    "docs/README.md": "PAGES.md",
    "docker/README.md": "IMAGES.md",
    "recipes/README.md": "RECIPES.md",
}
AT_ROOT = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


def pages() -> dict[Path, str]:
    """Return each source's name on the site."""
    found = {ROOT / source: name for source, name in RENAMED.items() if (ROOT / source).is_file()}
    for source in [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in AT_ROOT)]:
        found.setdefault(source, source.name)
    return found


def rewritten(source: Path, text: str, site: dict[Path, str], files: set[Path]) -> str:
    """Return the page with its links rewritten to the site; add to ``files`` what must be copied."""

    def lead(link: re.Match[str]) -> str:
        opening, target, closing = link.groups()
        path, hash_, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link.group()
        wanted = (source.parent / path).resolve()
        if wanted in site:
            return f"{opening}{site[wanted]}{hash_}{anchor}{closing}"
        if not wanted.is_file():
            raise SystemExit(f"{source.relative_to(ROOT)}: the link {target} leads to no file")
        files.add(wanted)
        return f"{opening}{wanted.relative_to(ROOT).as_posix().removeprefix('docs/')}{closing}"

    # Every second piece is a block of code.
    pieces = FENCE.split(text)
    return "".join(piece if i % 2 else LINK.sub(lead, piece) for i, piece in enumerate(pieces))


def main(folder: Path) -> None:
    """Write all pages and the files that they link to into the folder."""
    site = pages()
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    unnamed = [name for name in site.values() if not re.search(rf"\b{re.escape(name)}$", navigation, re.MULTILINE)]
    if unnamed:
        raise SystemExit(f"mkdocs.yml: its nav does not name {', '.join(unnamed)}; every page has a place in it")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    files: set[Path] = set()
    for source, name in site.items():
        text = rewritten(source, source.read_text(encoding="utf-8"), site, files)
        (folder / name).write_text(text, encoding="utf-8")
    for file in files:
        copy = folder / file.relative_to(ROOT).as_posix().removeprefix("docs/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


if __name__ == "__main__":
    main(ROOT / sys.argv[1])
