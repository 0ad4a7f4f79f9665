"""Check the built site: every internal link, anchor and picture leads somewhere, and no markup of Sphinx is left.

    python scripts/check_site.py out/site

`make docs` runs it after the build. Links to other sites are not followed.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: A role of Sphinx, and a link of Markdown that was left as text.
RAW = re.compile(r":(?:class|func|meth|attr|mod|data|exc|obj):|\]\([^)\s]+\)")
LINKING = {"a": "href", "link": "href", "img": "src", "script": "src"}


class Page(HTMLParser):
    """The links, the anchors and the raw markup of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.raw: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note links and anchors."""
        self._code += tag in ("code", "script", "style")
        given = dict(attrs)
        self.anchors.update(filter(None, (given.get("id"), given.get("name"))))
        link = given.get(LINKING.get(tag, ""))
        if link is not None:
            self.links.append(link)

    def handle_endtag(self, tag: str) -> None:
        """Leave code."""
        self._code -= tag in ("code", "script", "style")

    def handle_data(self, data: str) -> None:
        """Note raw markup outside code."""
        if not self._code:
            self.raw += RAW.findall(data)


def faults(site: Path) -> list[str]:
    """Return a line for each broken link, missing anchor and raw markup of the site's pages."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: {markup} is not rendered" for markup in page.raw]
        for link in page.links:
            parts = urlsplit(link)
            # The page for missing addresses may be shown at any address, so its links are absolute.
            if parts.scheme or parts.netloc or (name.name == "404.html" and link.startswith("/")):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name}: {link} leads to no file")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name}: {link} leads to no anchor")
    return found


def main(site: Path) -> int:
    """Print the faults; 1 if there are any, or no pages."""
    found = faults(site)
    for fault in found:
        print(fault)
    number = len(list(site.rglob("*.html")))
    print(f"{site}: {number} pages, {len(found)} faults")
    return int(bool(found) or not number)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
