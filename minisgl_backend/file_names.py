"""Files whose names are not ASCII, inside Triton's stub, too.

The Python there takes the names of files for ASCII, whatever the locale and the environment are.
Must not know what the files are for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisgl_backend.errors import ConfigError


@contextmanager
def reachable(path: Path) -> Iterator[Path]:
    """The path as the file functions of this Python take it: if names are taken for ASCII, each
    other byte is a lone surrogate. A ``ConfigError`` inside names the path as it was given."""
    try:
        name = str(path).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise ConfigError(f"{str(path)!r} is no name of a file: it is not valid Unicode") from None
    place = Path(os.fsdecode(name))
    try:
        yield place
    except ConfigError as error:
        raise ConfigError(str(error).replace(str(place), str(path))) from None
