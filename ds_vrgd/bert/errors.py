"""The one exception for input that a user can put right."""

from __future__ import annotations


class InputError(ValueError):
    """Something the user gave cannot be used. The message names the setting, its value and the way out.

    The launcher prints the message alone, without a traceback, and ends with exit status 2.
    """
