"""Plain paragraphs of HTML, OSIS, MediaWiki's markup, reStructuredText and POD.

A paragraph is one line with single blanks, as everything after it expects. What is no prose is left out: tables, code,
headings, lists of names.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser

_BLANK_LINE = re.compile(r"\n[ \t]*\n")


def paragraphs(text: str, least_words: int) -> list[str]:
    """Return the blocks between blank lines, each on one line, that have at least ``least_words``."""
    return _of_length((" ".join(block.split()) for block in _BLANK_LINE.split(text)), least_words)


def _of_length(texts: Iterable[str], least_words: int) -> list[str]:
    return [text for text in texts if len(text.split()) >= least_words]


_HTML_BLOCK = re.compile(r"p|li|[uod]l|d[dt]|h[1-6r]|br|blockquote|div|table|t[rdh]|section|note")
_HTML_NOT_READ = re.compile(r"script|style|pre|title")


class _HtmlText(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self._unread = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._unread += bool(_HTML_NOT_READ.fullmatch(tag))
        if _HTML_BLOCK.fullmatch(tag):
            self.pieces.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if self._unread and _HTML_NOT_READ.fullmatch(tag):
            self._unread -= 1
        if _HTML_BLOCK.fullmatch(tag):
            self.pieces.append("\n\n")

    def handle_data(self, data: str) -> None:
        if not self._unread:
            # A line break of the file is a blank in HTML; paragraphs end at tags alone.
            self.pieces.append(data.replace("\n", " "))


def from_html(text: str, least_words: int = 8) -> list[str]:
    """Return the paragraphs of a page or a fragment."""
    parser = _HtmlText()
    parser.feed(text)
    parser.close()
    return paragraphs("".join(parser.pieces), least_words)


_OSIS_NOT_READ = re.compile(r"<(note|table|figure)\b[^>]*(?<!/)>.*?</\1>", re.DOTALL)
_OSIS_BREAK = re.compile(r"</?(?:p|div|chapter|title|lb|lg|l|list|item|milestone)\b[^>]*>")
_TAG = re.compile(r"<[^>]+>")


def from_osis(text: str, least_words: int = 4) -> list[str]:
    """Return the paragraphs of OSIS XML, the markup of SWORD's texts, without notes; verses are joined."""
    text = _OSIS_BREAK.sub("\n\n", _OSIS_NOT_READ.sub(" ", text))
    return paragraphs(html.unescape(_TAG.sub("", text)).replace("\u00b6", ""), least_words)


_WIKI_REMOVED = (
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"<ref\b[^>]*/>", re.IGNORECASE),
    re.compile(r"<(ref|gallery|math|timeline|code|pre|source|nowiki)\b[^>]*>.*?</\1>", re.DOTALL | re.IGNORECASE),
)
_WIKI_NESTED = (re.compile(r"\{\{[^{}]*\}\}"), re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL))
_WIKI_MEDIA = re.compile(r"\[\[(?:file|image|category|media):[^\[\]]*\]\]", re.IGNORECASE)
_WIKI_LINK = re.compile(r"\[\[(?!(?:file|image|category|media):)(?:[^|\[\]]*\|)?([^|\[\]]*)\]\]", re.IGNORECASE)
_WIKI_OUTSIDE_LINK = re.compile(r"\[(?:https?:)?//\S+ ?([^\]]*)\]")
_WIKI_EMPTY = re.compile(r" ?\([\s,;]*\)")  # what is left of (pronounced {{IPA ...}})


def from_wikitext(text: str, least_words: int = 10) -> list[str]:
    """Return the paragraphs of an article; headings, lists, tables, notes and templates are left out."""
    for pattern in _WIKI_REMOVED:
        text = pattern.sub("", text)
    for pattern in _WIKI_NESTED:
        text = _innermost_first(pattern, text, "")
    # Links first: the caption of a picture may hold some, inside the picture's brackets.
    text = _innermost_first(_WIKI_MEDIA, _innermost_first(_WIKI_LINK, text, r"\1"), "")
    text = _WIKI_OUTSIDE_LINK.sub(r"\1", text)
    text = html.unescape(_TAG.sub("", re.sub(r"'{2,}", "", text)))
    lines = (" ".join(_WIKI_EMPTY.sub("", line).split()) for line in text.split("\n") if line[:1] not in "*#|=!:; {}")
    return _of_length(lines, least_words)


def _innermost_first(pattern: re.Pattern[str], text: str, replacement: str) -> str:
    while True:
        text, count = pattern.subn(replacement, text)
        if not count:
            return text


# Directives whose content is no prose.
_RST_CODE = re.compile(
    r"\.\. (?:code|code-block|sourcecode|highlight|literalinclude|parsed-literal|testsetup|testcode|testoutput|doctest|"
    r"productionlist|math|raw|table|list-table|csv-table|flat-table|kernel-figure|kernel-render|figure|image|toctree|"
    r"contents|index|include|kernel-doc|kernel-include|tabularcolumns|only|ifconfig)::|\.\. (?![\w:-]+::)"
)
_RST_NO_PROSE = re.compile(r"[-=~^\"'`#*+<>.:_]{3,}|[+|>$:=#]|\.\. |__|[-*] +\[|(?:def|class|import|from|struct|int) ")
# An item of a list is a block of its own.
_RST_BLOCKS = re.compile(r"\n[ \t]*\n|\n(?=[ \t]*(?:[-*\u2022]|\d{1,2}[.)]|#\.) )")
_RST_BULLET = re.compile(r"^(?:[-*\u2022]|\(?(?:\d{1,3}|[a-z]|#)[.)]) +")
_RST_UNDERLINE = re.compile(r"([^\w\s])\1{2,}")
_RST_ROLE = re.compile(r":[a-zA-Z][\w:+.-]*:`[~!]?([^`<]*?)(?:\s*<[^`>]*>)?`")
_RST_LITERAL = re.compile(r"``(.+?)``")
_RST_LINK = re.compile(r"`([^`<]*?)(?:\s*<[^`>]*>)?`_{0,2}")
_RST_STRESS = re.compile(r"(?<![\w*])\*{1,2}(?=\S)([^*]+?)(?<=\S)\*{1,2}(?![\w*])")
_ENDS = tuple(".:!?)")


def from_restructured_text(text: str, least_words: int = 8) -> Iterator[str]:
    """Return paragraphs and list items that look like sentences; code and tables are left out."""
    code_indent: int | None = None  # of what introduced code; whatever is indented deeper belongs to it
    for block in _RST_BLOCKS.split(text.expandtabs()):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        indent = len(lines[0]) - len(lines[0].lstrip())
        if code_indent is not None and indent > code_indent:
            continue
        first, last = lines[0].strip(), lines[-1].rstrip()
        is_code = _RST_CODE.match(first) or first == ".." or (last.endswith("::") and not first.startswith(".. "))
        code_indent = indent if is_code else None
        if any(_RST_UNDERLINE.fullmatch(line.strip()) for line in lines):
            continue  # a heading, or a table
        if _RST_NO_PROSE.match(first):
            continue
        paragraph = _RST_BULLET.sub("", first, count=1)
        paragraph = " ".join([paragraph, *lines[1:]])
        for pattern in (_RST_ROLE, _RST_LITERAL, _RST_LINK, _RST_STRESS):
            paragraph = pattern.sub(r"\1", paragraph)
        paragraph = " ".join(re.sub(r"::$", ":", paragraph.strip()).split())
        words = paragraph.split()
        if (
            len(words) >= least_words
            and paragraph.endswith(_ENDS)
            and sum(word[0].isalpha() for word in words) > 0.75 * len(words)
        ):
            yield paragraph


_POD_ESCAPE = re.compile(r"E<(\w+)>")
_POD_LONG = re.compile(r"([A-Z])<<+\s+(.*?)\s+>>+", re.DOTALL)
_POD_SHORT = re.compile(r"([A-Z])<([^<>]*)>")
_POD_ESCAPES = {"lt": "\0", "gt": "\1", "sol": "/", "verbar": "|"}  # brackets come last, lest they look like codes


def _pod_code(match: re.Match[str]) -> str:
    letter, content = match[1], match[2]
    if letter in "XZ":  # index entries, and nothing
        return ""
    if letter == "L":
        return content.split("|")[0]
    return content.replace("<", "\0").replace(">", "\1")


def from_pod(text: str, least_words: int = 8) -> list[str]:
    """Return the paragraphs of perlpod; commands and verbatim paragraphs are left out."""
    prose = [block for block in _BLANK_LINE.split(text) if block[:1] not in ("=", " ", "\t")]
    plain = "\n\n".join(block.lstrip("\n") for block in prose)
    plain = _POD_ESCAPE.sub(lambda match: _POD_ESCAPES.get(match[1]) or html.unescape(f"&{match[1]};"), plain)
    plain = _POD_LONG.sub(_pod_code, plain)
    while (shorter := _POD_SHORT.sub(_pod_code, plain)) != plain:
        plain = shorter
    return paragraphs(plain.replace("\0", "<").replace("\1", ">"), least_words)
