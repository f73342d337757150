"""Trains the tokenizer and the model and writes the Hugging Face folder."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from tools.demo_model.batches import BatchMaker
from tools.demo_model.model import DemoModel, Shape
from tools.demo_model.tokenizer import save_tokenizer, train_tokenizer


@dataclass(frozen=True)
class Plan:
    """How to train."""

    steps: int = 3600
    tokens: int = 4096
    matrix_rate: float = 0.003
    other_rate: float = 0.003
    decay: float = 0.02
    seed: int = 20
    device: str = "cpu"
    shape: Shape = field(default_factory=Shape)


def train(folder: Path, plan: Plan) -> float:
    """Trains from scratch, writes the folder, and returns the seconds it took."""
    started = time.perf_counter()
    tokenizer = train_tokenizer(plan.seed)
    torch.manual_seed(plan.seed)
    model = DemoModel(plan.shape).to(plan.device)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            matrices,
            lr=plan.matrix_rate,
            weight_decay=plan.decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=plan.other_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    batches = BatchMaker(tokenizer, plan.seed, plan.tokens, plan.shape.context).batches(plan.steps)
    columns = ("step {task.completed}/{task.total}", "loss {task.fields[loss]:.4f}")
    with Progress(BarColumn(), *map(TextColumn, columns), TimeRemainingColumn()) as progress:
        task = progress.add_task("train", total=plan.steps, loss=math.nan)
        average = math.nan
        for step, batch in enumerate(batches):
            share = _rate_share(step, plan.steps)
            for optimizer, rate in zip(optimizers, rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * share
            loss = _loss(model, *(part.to(plan.device) for part in batch))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            if step % 20 == 0:
                value = loss.item()
                average = value if math.isnan(average) else 0.8 * average + 0.2 * value
                progress.update(task, completed=step + 1, loss=average)
        progress.update(task, completed=plan.steps)
    save_tokenizer(tokenizer, folder, plan.shape.context)
    _save_model(model, folder)
    return time.perf_counter() - started


def _rate_share(step: int, steps: int) -> float:
    """Warm up, hold, then fall to zero."""
    warm_up, fall = max(min(100, steps // 10), 1), 0.6 * steps
    return min((step + 1) / warm_up, 1.0, (steps - step) / fall)


def _loss(model: DemoModel, tokens: Tensor, positions: Tensor, weights: Tensor) -> Tensor:
    shares = weights[:, 1:].flatten()
    wanted = shares.nonzero().squeeze(1)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(tokens[:, :-1], positions[:, :-1], wanted)
    targets = tokens[:, 1:].flatten()[wanted]
    losses = F.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * shares[wanted]).sum() / shares.sum()


def _save_model(model: DemoModel, folder: Path) -> None:
    tensors = {
        name: parameter.detach().to("cpu", torch.bfloat16).contiguous()
        for name, parameter in model.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    generation = {
        "bos_token_id": None,
        "do_sample": False,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "max_new_tokens": 256,
    }
    for name, content in (
        ("config.json", model.shape.hf_config()),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
