"""Options from names and values: what is accepted, what means the default, what is refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from minisgl_backend.config import EngineOptions, options_by_subject
from minisgl_backend.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("num_pages", "32", 32),
        ("max_queued_tokens", "5,000,000", 5_000_000),
        ("max_queued_tokens", "5_000_000", 5_000_000),
        ("drain_timeout_s", "2.5", 2.5),
        ("drain_timeout_s", 2, 2.0),
        ("overlap", "False", False),
        ("overlap", "on", True),
        ("cuda_graph_batch_sizes", "1,2,4", "1,2,4"),
        ("num_pages", "auto", None),
        ("load_format", "auto", "auto"),
        ("max_running_requests", "", 256),
        ("seed", None, None),
    ],
)
def test_values_are_read_by_the_type_of_their_option(name: str, value: Any, expected: Any) -> None:
    found = getattr(EngineOptions.from_mapping({name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_page", "4", "unknown option 'num_page'; did you mean 'num_pages'?"),
        ("zzz", "4", "unknown option 'zzz'"),
        ("num_pages", "four", "option num_pages must be an integer, got 'four'"),
        ("num_pages", 4.0, "option num_pages must be an integer, got 4.0"),
        ("num_pages", True, "option num_pages must be an integer, got True"),
        ("tensor_parallel_size", "1,2", "option tensor_parallel_size must be an integer"),
        ("drain_timeout_s", "2,5", "option drain_timeout_s must be a number, got '2,5'"),
        ("drain_timeout_s", "nan", "option drain_timeout_s must be finite"),
        ("overlap", "maybe", "option overlap must be true or false, got 'maybe'"),
        ("cache", "none", "option cache must be one of radix, naive, got 'none'"),
        ("num_pages", "0", "option num_pages must be at least 1, got 0"),
        ("memory_ratio", "1.5", "option memory_ratio must be at most 1, got 1.5"),
        ("drain_timeout_s", "1e300", "option drain_timeout_s must be at most 604800, got 1e+300"),
        (
            "seed",
            str(2**63),
            "option seed must be at most 9223372036854775807, got 9223372036854775808",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineOptions.from_mapping({name: value})
    assert str(raised.value).startswith(message)


def test_every_option_has_a_subject() -> None:
    listed = [spec.name for options in options_by_subject().values() for spec in options]
    assert listed == [spec.name for spec in fields(EngineOptions)]
