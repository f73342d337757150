"""The promises that the server of this folder's tests breaks when it is told to."""

from __future__ import annotations

from enum import Enum


class Broken(Enum):
    """What happens to a promise."""

    ANOTHER_TOKEN = "every token is another one"
    PATH = "an error tells a path"
    NAN = "a temperature that is no number passes"
    CANCEL = "a cancel is ignored"
    DESCRIPTORS = "descriptors leak"
    HELD = "an answer is held back"
    TWO_ENDS = "an answer ends twice"
    ROW = "a row is given back twice"
    PAGE = "a page leaks"
    PREFIX = "a prefix stays locked"
