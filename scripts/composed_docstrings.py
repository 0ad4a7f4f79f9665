"""Show the site the docstrings as a reader of Markdown expects them.

mkdocs.yml names this extension of griffe, which otherwise reads docstrings from the source. It takes those that a class
decorator composes (`ds_vrgd.optim.options.documented`) from the imported class. Markdown knows neither Sphinx's roles
(``:class:`ds_vrgd.VRLAMB```), which become code, nor the ``::`` in front of an indented block.
"""

import inspect
import re
from typing import Any

import griffe

ROLE = re.compile(r":[a-z]+:`(~?)([^`]+)`")
BLOCK = re.compile(r"(\w)?\s*::$", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Return the text with each role as code, ``~`` leaving only the last part, and with ``::`` as Sphinx shows it."""
    text = ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    return BLOCK.sub(lambda end: f"{end[1]}:" if end[1] else "", text)


class ComposedDocstrings(griffe.Extension):
    """Replace the docstrings."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """Take the docstring of a decorated class from the imported class."""
        if any(decorator.callable_path.endswith(".documented") for decorator in cls.decorators):
            text = inspect.getdoc(griffe.dynamic_import(cls.path)) or ""
            cls.docstring = griffe.Docstring(as_markdown(text), parent=cls)

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Replace the markup of Sphinx."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
