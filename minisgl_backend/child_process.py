"""What a child process needs of its parent's environment. Must not know what a child does."""

from __future__ import annotations

import os
import sys


def import_path() -> dict[str, str]:
    """Variables with which a child imports the same modules as this process, in any folder."""
    folders = map(os.path.abspath, sys.path)
    return {"PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
