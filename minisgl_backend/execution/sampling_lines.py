"""What sampling has to know of single tokens for one request, as in lines of a ``SamplingTable``.

Pure arithmetic on the host. Ids that the model cannot produce need neither a bias nor a mark.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from minisgl_backend.attention.base import HostArray
from minisgl_backend.kernels.sampling_table import IN_PROMPT, IS_STOP, ONCE
from minisgl_backend.plan import Admission
from minisgl_backend.request import IntArray, SamplingParams

_Biases: TypeAlias = npt.NDArray[np.float32]


def marks_of(admission: Admission, vocab_size: int) -> tuple[HostArray, IntArray] | None:
    """Tokens int64[n] and their marks int32[n]; all others have none. None if none is needed."""
    params = admission.sampling
    stops = held_back(params, vocab_size)
    if not params.has_penalties:
        return (stops, np.full(len(stops), IS_STOP, np.int32)) if len(stops) else None
    prompt, output = np.split(admission.history, [admission.num_prompt_tokens])
    line = ONCE * np.bincount(output, minlength=vocab_size)
    line[prompt] += IN_PROMPT
    line[stops] += IS_STOP
    tokens = np.flatnonzero(line != 0)
    return tokens, line[tokens].astype(np.int32)


def held_back(params: SamplingParams, vocab_size: int) -> HostArray:
    """The stop tokens, int64[n], that cannot be sampled before there are ``min_tokens``."""
    stops, known = params.stop_token_ids if params.min_tokens else (), range(vocab_size)
    return np.unique(np.array([token for token in stops if token in known], np.int64))


def bias_of(params: SamplingParams, vocab_size: int) -> tuple[HostArray, _Biases] | None:
    """Tokens int64[n] and what is added to their logits, float32[n]. None if there are none."""
    known = range(vocab_size)
    bias = [(token, value) for token, value in params.logit_bias if token in known]
    if not bias:
        return None
    ids, values = zip(*bias, strict=True)
    tokens, at = np.unique(ids, return_inverse=True)
    return tokens, np.bincount(at, values).astype(np.float32)
