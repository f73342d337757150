"""The command groups if not every extra is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial

import click
import pytest
from click.testing import CliRunner

from minisgl_backend.cli.interrupt import signals_as_ctrl_c
from minisgl_backend.cli.main import LazyGroup, main
from minisgl_bench.command import bench

CONTEXT = click.Context(main)
OF_TENSORS = {"kernels", "fp8-pages", "quantized-weights", "state-dtypes"}
MEASURE = [["bench", name] for name in bench.list_commands(CONTEXT) if name not in OF_TENSORS]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> LazyGroup:
    """A command whose module needs uvicorn, which is not installed, and one that works."""
    for name in [name for name in sys.modules if name.startswith("minisgl_gateway")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    places = {
        "gateway": "minisgl_gateway.command:gateway",
        "planner": "minisgl_bench.planner:planner",
    }
    return LazyGroup("minisgl", places, "Help.")


def test_help_lists_what_is_not_installed(group: LazyGroup) -> None:
    result = CliRunner().invoke(group, ["--help"], terminal_width=200)
    assert result.exit_code == 0
    assert "(needs uvicorn: pip install '.[gateway]' in a clone)" in result.output
    assert "planner" in result.output


@pytest.mark.parametrize(
    "commands", [[[]], [[name] for name in main.list_commands(CONTEXT) if name != "bench"], MEASURE]
)
def test_help_brings_no_package_that_is_slow_to_import(commands: list[list[str]]) -> None:
    """But for benchmarks of tensors, and the list of all benchmarks."""
    code = (
        "import sys; from minisgl_backend.cli.main import main\n"
        f"for words in {commands!r}:\n"
        "    main([*words, '--help'], standalone_mode=False)\n"
        "    slow = {'torch', 'fastapi'} & {*sys.modules}\n"
        "    assert not slow, (words, slow)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--port", "0", "x"]])
def test_what_is_not_installed_says_what_to_install(group: LazyGroup, arguments: list[str]) -> None:
    result = CliRunner().invoke(group, ["gateway", *arguments])
    assert result.exit_code == 1
    assert result.output == "Error: gateway needs uvicorn: pip install '.[gateway]' in a clone\n"


def test_what_is_missing_only_when_a_command_runs(
    group: LazyGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "uvicorn")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "Serve OpenAI's" in CliRunner().invoke(group, ["--help"]).output
    result = CliRunner().invoke(group, ["gateway", "--port", "0"])
    assert result.exit_code == 1
    assert result.output == "Error: gateway needs fastapi: pip install '.[gateway]' in a clone\n"


def test_a_benchmark_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    result = CliRunner().invoke(main, ["bench", "adapters"])
    assert result.exit_code == 1
    assert result.output == "Error: adapters needs torch: pip install '.[server]' in a clone\n"


@pytest.mark.parametrize(
    "option", ["--http-port", "--grpc-port", "--metrics-port", "--health-port"]
)
def test_a_port_is_a_port(option: str) -> None:
    result = CliRunner().invoke(main, ["serve", option, "65536"])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': 65536 is not in the range" in result.output


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["srve"], "'srve'. Did you mean 'serve'?"),
        (["bench", "plannr"], "'plannr'. Did you mean 'planner'?"),
        (["xyzzy"], "'xyzzy'."),
    ],
)
def test_an_unknown_command_is_told_the_nearest(arguments: list[str], hint: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.output.endswith(f"No such command {hint}\n")


def test_a_request_that_a_benchmark_cannot_make_is_one_line() -> None:
    sizes = ["--shared", "9000", "--groups", "1", "--num-pages", "8"]
    result = CliRunner().invoke(main, ["bench", "prefixes", *sizes])
    assert result.exit_code == 2
    assert result.output.endswith("Error: prompt of 9128 tokens does not fit the context of 8192\n")


@pytest.mark.parametrize("option", ["--host", "--model", "--max-queued-requests"])
def test_a_value_that_is_empty(option: str) -> None:
    result = CliRunner().invoke(main, ["serve", option, "", "--allow-remote"])
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: {option} must not be empty")


def test_signals_count_as_ctrl_c_though_that_is_ignored(request: pytest.FixtureRequest) -> None:
    """As in a shell's background job; what is ignored on purpose, as by nohup, stays ignored."""
    for number, handler in (
        (signal.SIGINT, signal.SIG_IGN),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_IGN),
    ):
        request.addfinalizer(partial(signal.signal, number, signal.signal(number, handler)))

    with pytest.raises(SystemExit) as ended, signals_as_ctrl_c():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a second one does not disturb cleaning up
    assert ended.value.code == 143


def test_every_command_is_there() -> None:
    result = CliRunner().invoke(main, ["--help"], terminal_width=200)
    assert result.exit_code == 0 and "(needs" not in result.output


@pytest.mark.parametrize("command", [[], ["bench"]])
def test_help_of_commands_is_not_cut(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"], terminal_width=60)
    assert result.exit_code == 0
    assert "..." not in result.output.partition("Commands:")[2]


def test_help_of_the_engines_options_shows_what_they_take() -> None:
    output = CliRunner().invoke(main, ["serve", "--help"], terminal_width=200).output
    own, _, of_engine = output.partition("Options of the engine:")
    assert "--http-port" in own and "--http-port" not in of_engine
    assert "--cache [radix|naive]" in of_engine
    assert "--page-size INTEGER" in of_engine
    assert "--overlap [true|false]" in of_engine


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "gateway"])
def test_serving_and_asking_need_no_benchmarks_or_checks(command: str) -> None:
    code = (
        "import sys; from click.testing import CliRunner; import minisgl_backend.cli.serve; "
        "from minisgl_backend.cli.main import main; "
        f"assert CliRunner().invoke(main, [{command!r}, '--help']).exit_code == 0; "
        "packages = {name.partition('.')[0] for name in sys.modules}; "
        "assert not packages & {'minisgl_bench', 'minisgl_check', 'minisgl_kit', 'unittest'}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_adapters_of_a_node_other_than_0_are_read_too() -> None:
    """All nodes may be started by one command, so a node must know what node 0 was given."""
    nodes = ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"]
    given = ["--model", "anything", *nodes, "--health-port", "0", "--lora-module", "chat"]
    result = CliRunner().invoke(main, ["serve", *given])
    assert result.exit_code == 2
    assert "--lora-module must be NAME=PATH without commas, got 'chat'" in result.output
