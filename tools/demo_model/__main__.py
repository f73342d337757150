"""``python -m tools.demo_model``: makes, trains and scores the demo model."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path
from typing import Final

import torch

FOLDER: Final = Path(__file__).parents[2] / "minisgl_backend" / "demo_model"


def _corpus(arguments: argparse.Namespace) -> bool:
    from tools.demo_model.corpus import CorpusMaker

    maker = CorpusMaker(arguments.seed)
    for document in islice(maker.documents(), arguments.documents):
        print(document.text(), end="\n----\n")
    return True


def _train(arguments: argparse.Namespace) -> bool:
    from tools.demo_model.train import Plan, train

    plan = Plan(seed=arguments.seed, device=arguments.device, steps=arguments.steps)
    seconds = train(arguments.folder, plan)
    print(f"Trained in {seconds / 60:.1f} minutes.")
    return True


def _score(arguments: argparse.Namespace) -> bool:
    from tools.demo_model.score import score

    return score(arguments.folder, arguments.device)


def _all(arguments: argparse.Namespace) -> bool:
    return _train(arguments) and _score(arguments)


def main() -> int:
    """Runs the command that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_model", description=__doc__)
    parser.add_argument("command", choices=("corpus", "train", "score", "all"))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the model's folder")
    parser.add_argument("--device", default="cpu", help="where to compute: cpu or cuda")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3600, help="training steps")
    parser.add_argument("--documents", type=int, default=20, help="documents that corpus prints")
    parser.add_argument("--threads", type=int, default=2, help="threads on the CPU")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    commands = {"corpus": _corpus, "train": _train, "score": _score, "all": _all}
    return 0 if commands[arguments.command](arguments) else 1


if __name__ == "__main__":
    sys.exit(main())
