"""The process of a rank other than 0 of an engine that breaks when it is told to."""

from __future__ import annotations

from minisgl_backend.cli.rank import run
from minisgl_check.defect import Defect
from minisgl_check.frail_model import own_frailty

if __name__ == "__main__":
    run(own_frailty(raises_once=Defect.ONE_FORWARD_OF_RANK_1).parts())
