"""Bounds of the numbers in config.json, beyond any model: larger ones are mistakes, refused before
they exhaust memory."""

from __future__ import annotations

from typing import Final

MOST_VOCABULARY: Final = 2**24
MOST_WIDTH: Final = 2**20
MOST_LAYERS: Final = 2**10
MOST_HEADS: Final = 2**12
MOST_EXPERTS: Final = 2**12
MOST_POSITIONS: Final = 2**27
