"""A rank's part of a model, ready to compute one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minisgl_backend.attention.base import Attend, AttentionSetting, Chunks
from minisgl_backend.attention.choose import choose_attention
from minisgl_backend.execution.states import StateStorage
from minisgl_backend.execution.storage import KVStorage
from minisgl_backend.kernels.chunk_runs import Run, Runs
from minisgl_backend.models.build import build_model
from minisgl_backend.models.decoder import Decoder, LayersOutput
from minisgl_backend.models.spec import ModelSpec
from minisgl_backend.models.token_mixing import RecurrentRows
from minisgl_backend.parallel.group import Group

CPU = torch.device("cpu")
PAGE_SIZE = 16
CONTEXT = 64


@dataclass(frozen=True, slots=True, eq=False)
class PromptOnRank:
    """A model with pages, and states if it needs them, for one sequence of up to ``CONTEXT``
    tokens; slots are positions."""

    model: Decoder
    setting: AttentionSetting

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        folder: Path,
        group: Group,
        *,
        whole_experts: bool = False,
        eagle: Path | None = None,
    ) -> PromptOnRank:
        """``eagle`` is the folder of an EAGLE-3 layer, if the spec has one."""
        shape = spec.attention_shape(group.size)
        model = build_model(
            spec,
            folder,
            dtype=torch.float32,
            device=CPU,
            group=group,
            max_sequence_length=CONTEXT,
            whole_experts=whole_experts,
            eagle=eagle,
        )
        setting = AttentionSetting(
            shape=shape,
            page_size=PAGE_SIZE,
            max_sequence_length=CONTEXT,
            dtype=torch.float32,
            kv_dtype=torch.float32,
            max_batch_size=1,
            max_captured_batch_size=0,
            device=CPU,
        )
        num_pages = CONTEXT // PAGE_SIZE
        kv = KVStorage(
            shape, num_pages=num_pages, page_size=PAGE_SIZE, dtype=torch.float32, device=CPU
        )
        model.bind_pages(kv.layers)
        if spec.recurrent is not None:
            states = StateStorage(
                spec.recurrent.of_rank(group.size),
                num_rows=1,
                num_snapshots=0,
                dtype=torch.float32,
                state_dtype=torch.float32,
                device=CPU,
                num_checks=0,
                most_tokens=0,
            )
            model.bind_states(states.layers)
        return cls(model, setting)

    def residual(self, tokens: Tensor) -> Tensor:
        """The residual stream of a prompt."""
        return self.output(tokens).residual

    def output(self, tokens: Tensor) -> LayersOutput:
        """What the layers return of a prompt."""
        length, recurrent = len(tokens), None
        if self.model.spec.recurrent is not None:
            runs = Runs.of([Run(0, length, 0, position=0)], torch.from_numpy)
            recurrent = RecurrentRows(torch.empty(0, dtype=torch.int64), runs)
        places = torch.arange(length)
        output: LayersOutput = self.model(tokens, places, places, self.attend(0, length), recurrent)
        return output

    def mtp_states(self, tokens: Tensor, hidden: Tensor, start: int) -> Tensor:
        """The states of the MTP layer at the positions from ``start`` on."""
        end = start + len(tokens)
        places = torch.arange(start, end)
        return self.model.forward_mtp(tokens, hidden, places, places, self.attend(start, end))

    def attend(self, start: int, end: int) -> Attend:
        """Attention of the positions from ``start`` to ``end``."""
        offsets, ends = np.array([0, end - start], np.int32), np.array([end], np.int32)
        chunks = Chunks(
            rows=torch.zeros(1, dtype=torch.int32),
            offsets=torch.from_numpy(offsets),
            ends=torch.from_numpy(ends),
            page_table=torch.arange(CONTEXT // PAGE_SIZE, dtype=torch.int32)[None],
            max_length=end - start,
            max_end=end,
            host_offsets=offsets,
            host_ends=ends,
        )
        return choose_attention(None, self.setting).plan(None, chunks)
