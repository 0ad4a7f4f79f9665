"""Paragraphs out of markup: what stays, what goes, and that no letter is lost in between."""

from __future__ import annotations

from ds_vrgd_recipes.bert.packages.markup import from_html, from_osis, from_pod, from_restructured_text, from_wikitext


def test_html() -> None:
    text = """<title>A title</title><script>var x = 1;</script>
    <p>Words of one
    paragraph with <b>bold</b> and <code>code</code> &amp; more.<br/>A new one.
    <pre>printed()</pre><ul><li>First<li>Second</ul></p>tail"""
    assert from_html(text, least_words=1) == [
        "Words of one paragraph with bold and code & more.",
        "A new one.",
        "First",
        "Second",
        "tail",
    ]
    assert from_html("<p>a b c</p><p>a b c d</p>", least_words=4) == ["a b c d"]


def test_osis() -> None:
    text = (
        '<div sID="1" type="x-p"/>\u00b6 And <w lemma="strong:H0430">God</w> said,<note placement="foot"><reference>'
        '1.6 </reference>Heb.</note> Let there be<transChange type="added"> light</transChange> &amp; life.'
        '<div eID="1"/><lb/>And it was so.<table><row><cell>1 2 3 4 5</cell></row></table>'
    )
    assert from_osis(text) == ["And God said, Let there be light & life.", "And it was so."]


def test_wikitext() -> None:
    text = """{{Infobox|{{nested}}|x}}
'''It''' ({{IPA|x}}) is a [[thing|kind]] of [[example]]s<ref>A<br/></ref> [http://x.org with a link] and ''stress''.
[[File:a.jpg|thumb|A caption of a picture with [[links|a link]] in it]]
{| class="x"
| a cell of a table which goes on for more than ten words in all
|}
== A heading that is long enough to look like a paragraph of text ==
* an item of a list that is long enough to look like a paragraph of text
A <!-- hidden
words -->short line.
"""
    assert from_wikitext(text) == ["It is a kind of examples with a link and stress."]
    assert from_wikitext(text, least_words=1)[1:] == ["A short line."]


def test_restructured_text() -> None:
    text = """.. _label:

Heading
=======

Seek (or use :meth:`~io.IOBase.seek`) the queue.  When ``x`` is *popped* off, see `the link
<http://x>`_ and :ref:`more <label>` words.

- an item of a list that is a sentence with more words in it
  and goes on here.
- another item of the same list which is a sentence as well.

Code that follows two colons is left out of all of this::

    This looks like a sentence of eight words.

        And this, deeper, looks like one just as well.

It goes on after the code with a sentence of words.

.. code-block:: c

   This looks like a sentence but is code in C.

.. note::

   The content of a note is prose and is kept as it is.

.. c:function:: int f(void)

   What a function does is prose, and it is kept, too.

.. comment

   What belongs to a comment is not prose of the page.

+------+-----------------------------------------------+
| cell | that has many words in it, as tables often do. |
+------+-----------------------------------------------+

A line of words without an end of a sentence
"""
    assert list(from_restructured_text(text)) == [
        "Seek (or use io.IOBase.seek) the queue. When x is popped off, see the link and more words.",
        "an item of a list that is a sentence with more words in it and goes on here.",
        "another item of the same list which is a sentence as well.",
        "Code that follows two colons is left out of all of this:",
        "It goes on after the code with a sentence of words.",
        "The content of a note is prose and is kept as it is.",
        "What a function does is prose, and it is kept, too.",
    ]


def test_pod() -> None:
    text = """=head1 NAME
X<index>

Use B<I<nested> codes>, C<< $x->{y} E<lt> 1 >> and F<file>X<entry> as L<the manual|perlsub/"It"> says, E<eacute>.

    print "verbatim text that has more than eight words in it";

=over 4
"""
    assert from_pod(text) == ["Use nested codes, $x->{y} < 1 and file as the manual says, \u00e9."]
