"""Whatever a config.json contains, it is read or refused: no other error, and no hang."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, Final

from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl_backend.errors import ConfigError
from minisgl_backend.models.catalog import parse_spec
from tests.conformance.quantized_checkpoints import CASES
from tests.conformance.test_published_configs import CONFIGS
from tests.properties.effort import examples

_PLAIN: Final = [dict(config) for config in CONFIGS.values()]
_QUANTIZED: Final = [
    {**CONFIGS["qwen3-yarn"], "quantization_config": dict(case.config)}
    for case in CASES.values()
    if case.config is not None
]
_DROPPED: Final = "(dropped)"
_STRANGE: Final[tuple[Any, ...]] = (
    *(_DROPPED, None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 10**12, 0.5, -0.5),
    *(float("inf"), float("nan"), 1e308, 1e-320, "", "x", "linear", "full_attention"),
    *([], [1], ["x"], [None], [[1]], [128, 0], {}, {"a": 1}, {"factor": 2.0}),
    {"full_attention": {}},
    {"full_attention": 1},
)
_ADDED: Final = (
    *("quantization_config", "rope_scaling", "rope_parameters", "layer_types", "sliding_window"),
    *("text_config", "per_layer_config", "no_rope_layers", "mlp_only_layers", "num_experts"),
    *("head_dim", "num_key_value_heads", "partial_rotary_factor", "eos_token_id", "auto_map"),
)


def _places(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield from ((*above, key) for key in _ADDED)
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from _places(value, (*above, key))


@settings(max_examples=examples(400))
@given(config=st.sampled_from([*_PLAIN, *_QUANTIZED]), data=st.data())
def test_every_config_is_read_or_refused(config: dict[str, Any], data: st.DataObject) -> None:
    config = copy.deepcopy(config)
    for _ in range(data.draw(st.integers(1, 3))):
        *above, key = data.draw(st.sampled_from(sorted(set(_places(config)))))
        table = config
        for name in above:
            table = table[name]
        value = data.draw(st.sampled_from(_STRANGE))
        if value == _DROPPED:
            table.pop(key, None)
        else:
            table[key] = copy.deepcopy(value)
    with contextlib.suppress(ConfigError):
        spec = parse_spec(config)
        assert spec.num_parameters > 0 and spec.context > 0
        spec.attention_shape(2)
