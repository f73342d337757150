"""The process of a rank other than 0 of an engine that breaks when it is told to."""

from __future__ import annotations

from minisgl_backend.tensor_parallel import main
from minisgl_check.defect import Defect
from minisgl_check.frail_model import own_frailty

if __name__ == "__main__":
    main(own_frailty(raises_once=Defect.ONE_FORWARD_OF_RANK_1).parts())
