"""LoRA adapters on two ranks: the tokens are those of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minisgl_backend import LLM
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.execution.rank_channel import MOST_BYTES
from minisgl_backend.models.catalog import load_spec
from minisgl_kit.adapters import write_adapter

PROMPTS = ["What is the capital of France?", "Count from 1 to 5.", "The opposite of hot is"]


def test_adapters_are_split_over_the_ranks(tmp_path: Path) -> None:
    spec = load_spec(Path(DEMO_MODEL))
    paths = {
        f"seed-{seed}": write_adapter(tmp_path / f"{seed}", spec, rank=4 * seed, seed=seed)
        for seed in (1, 2)
    }
    params: list[dict[str, Any]] = [
        {"lora_name": "seed-1", "temperature": 0, "max_tokens": 12},
        {"lora_name": "seed-2", "temperature": 0, "max_tokens": 12},
        {"temperature": 0, "max_tokens": 12},
    ]
    texts = []
    for size in (1, 2):
        with LLM(
            device="cpu", enable_lora=True, max_loras=1, num_pages=256, tensor_parallel_size=size
        ) as llm:
            for name, path in paths.items():
                llm.load_adapter(name, path)
            texts.append([output.text for output in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


def test_more_adapters_than_a_message_to_another_rank_holds(tmp_path: Path) -> None:
    spec = load_spec(Path(DEMO_MODEL))
    path = write_adapter(tmp_path / ("a" * 240), spec, rank=1)
    modules = ",".join(f"{n:0120d}={path}" for n in range(MOST_BYTES // 360))
    tasks = ",".join(f"{n}={7:0120d}" for n in range(MOST_BYTES // 120))
    assert len(modules) > MOST_BYTES and len(tasks) > MOST_BYTES
    with LLM(
        device="cpu",
        enable_lora=True,
        max_cpu_loras=1000,
        lora_modules=modules,
        lora_task_ids=tasks,
        num_pages=256,
        tensor_parallel_size=2,
    ) as llm:
        params = {"lora_name": f"{7:0120d}", "temperature": 0, "max_tokens": 1}
        assert llm.generate(PROMPTS[:1], params)[0].num_output_tokens == 1
