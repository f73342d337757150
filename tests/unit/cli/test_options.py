"""The engine's options as words of a command."""

from __future__ import annotations

from dataclasses import fields

import click
import pytest
from click.testing import CliRunner

from minisgl_backend.cli.options import engine_options
from minisgl_backend.config import EngineOptions, option_type


def taken(*words: str) -> EngineOptions:
    """The options that a command gets; raises what it raises."""
    found: list[EngineOptions] = []

    @click.command
    @engine_options
    def command(options: EngineOptions) -> None:
        found.append(options)

    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize(
    "name", [spec.name for spec in fields(EngineOptions) if option_type(spec.name) is bool]
)
def test_a_boolean_alone_is_true(name: str) -> None:
    option = "--" + name.replace("_", "-")
    for words in ([option], [option, "--page-size", "16"], [option, "true"], [f"{option}=true"]):
        assert getattr(taken(*words), name) is True
    for words in ([option, "false"], [f"{option}=false"]):
        assert getattr(taken(*words), name) is False


def test_other_options_need_a_value() -> None:
    with pytest.raises(AssertionError, match="'--page-size' requires an argument"):
        taken("--page-size")
