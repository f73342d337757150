"""Model repositories in which some models run other code than the shipped ones.

Knows the layout of a repository. Must not know what that code does.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from minisgl_backend.server.repository import shipped_repository


def repository_with(models: Mapping[str, str], folder: Path) -> Path:
    """A copy of the shipped repository, in ``folder``; ``models`` have these texts as model.py."""
    repository = folder / "model_repository"
    shutil.copytree(shipped_repository(), repository)
    for model, source in models.items():
        (repository / model / "1" / "model.py").write_text(source, encoding="utf-8")
    return repository
