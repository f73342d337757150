"""`minisgl chat`: a conversation in the terminal, with a running server or with one of its own.

Enter sends, Alt-Enter begins a new line, Ctrl-C stops the answer (what has come is remembered) or
clears the line, Ctrl-D ends. Lines that begin with a slash are commands; ``_COMMANDS`` lists them.
Must not know a protocol, or what a parameter means.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click
from click.core import ParameterSource
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from minisgl_client import Client, MinisglError, Result
from minisgl_client.cli.conversation import Conversation
from minisgl_client.cli.display import MarkdownDisplay, without_controls
from minisgl_client.cli.own_server import OwnServer
from minisgl_client.cli.request_options import (
    MAX_TOKENS,
    client_of,
    given,
    names_max_tokens,
    parameter_options,
    parameters_of,
    refuse_logprobs,
    server_options,
    with_fitting,
    with_inner,
)


@click.command()
@click.argument("serve_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTIONS...]")
@click.option(
    "--model",
    metavar="CHECKPOINT",
    help="start a server of this folder or id of the hub, with the OPTIONS of `minisgl serve` that "
    "stand after --, and end it with the chat",
)
@click.option("--system", metavar="TEXT", help="a system message")
@click.option(
    "--history",
    type=click.Path(dir_okay=False, path_type=Path),
    help="keeps what was typed  [default: minisgl/chat_history in $XDG_STATE_HOME]",
)
@parameter_options(max_tokens=512)
@server_options
def chat(
    serve_options: tuple[str, ...],
    model: str | None,
    system: str | None,
    history: Path | None,
    url: str,
    ensemble: str,
    timeout_s: float | None,
    **parameters: Any,
) -> None:
    """Talk with a model."""
    _check_place(model, serve_options)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the locale's encoding lacks
    console = Console(highlight=False)
    if not (console.is_terminal and os.isatty(0)):
        raise click.UsageError("chat needs a terminal; `minisgl generate` does not")
    asked = given(**parameters)
    refuse_logprobs(asked)
    conversation = Conversation(asked, system)
    typed = _opened_history(history or _default_history())
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)  # unlike Ctrl-C, which ends only an answer
    try:
        with ExitStack() as ending:
            server = None
            if model is not None:
                server = ending.enter_context(OwnServer(model, serve_options))
                url = _loaded(server, model, console)
            client = ending.enter_context(
                client_of(Client, url=url, model=ensemble, timeout_s=timeout_s)
            )
            if not client.is_ready():
                raise click.ClickException(f"no server with the model {ensemble} at {url}")
            name = ensemble if model is None else Path(model).name
            console.print(
                f"{escape(name)} at {url}. /help lists commands, Ctrl-D ends.", style="dim"
            )
            _Shell(client, conversation, console, typed, server).run()
    except MinisglError as error:
        raise click.ClickException(f"{error.code}: {error}") from None


def _check_place(model: str | None, serve_options: Sequence[str]) -> None:
    """Raise ``click.UsageError`` if options contradict each other about the server to talk to."""
    if model is None and serve_options:
        raise click.UsageError(f"{serve_options[0]} is for a server of its own: give --model, too")
    context = click.get_current_context()
    if model is not None and context.get_parameter_source("url") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--model starts a server of its own, and --url names another")


def _loaded(server: OwnServer, model: str, console: Console) -> str:
    """Show what the server says until it is ready; returns its address."""
    with console.status(f"loading {escape(model)}") as status:

        def show(line: str) -> None:
            text = without_controls(f"loading {model}: {line}")
            status.update(Text(text, no_wrap=True, overflow="ellipsis"))

        return server.wait_ready(show)


def _default_history() -> Path:
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:
        raise click.UsageError("this user has no home: say where by --history") from None
    return Path(state) / "minisgl" / "chat_history"


class _History(FileHistory):
    """Lines typed now and before, in a file. A line that cannot be written is kept until the chat
    ends; ``failure`` says why, the first time."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.failure: OSError | None = None

    def store_string(self, string: str) -> None:
        try:
            super().store_string(string)
        except OSError as error:
            self.failure = self.failure or error


def _opened_history(path: Path) -> _History:
    """What was typed before, in a file that only this user may read; it is made if it is missing.

    Raises ``click.ClickException``.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)
    except OSError as error:
        raise click.ClickException(f"the history cannot be kept: {error}") from None
    return _History(path)


class _Shell:
    """Reads lines, and carries them out or sends them."""

    def __init__(
        self,
        client: Client,
        conversation: Conversation,
        console: Console,
        history: _History,
        server: OwnServer | None,
    ) -> None:
        self._client = client
        self._server = server
        self._conversation = conversation
        self._console = console
        self._history = history
        self._prompt: PromptSession[str] = PromptSession(
            "> ",
            history=history,
            key_bindings=_keys(),
            multiline=True,
            completer=WordCompleter(list(_COMMANDS), sentence=True),
            complete_while_typing=False,
            bottom_toolbar=self._toolbar,
        )

    def run(self) -> None:
        """Go on until the end of the input, or /quit."""
        is_kept = True
        while True:
            try:
                line = self._prompt.prompt().strip()
                if is_kept and self._history.failure is not None:
                    is_kept = False
                    self._complain(f"the history is not kept: {self._history.failure}")
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._ask(line)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return

    def _toolbar(self) -> str:
        shown = (f"{name} {value}" for name, value in self._conversation.parameters.items())
        turn = len(self._conversation.turns) // 2 + 1
        return f" {' · '.join(shown)} · turn {turn} "

    def _ask(self, question: str) -> None:
        """Send a question, show the answer as it comes, remember both; further samples follow."""
        messages = self._conversation.messages(question)
        try:
            stream = self._client.stream(
                messages=messages, **with_fitting(self._conversation.parameters)
            )
            with suppress(KeyboardInterrupt), stream, MarkdownDisplay(self._console) as display:
                for delta in stream:
                    if delta.sample == 0:
                        display.push(delta.text)
        except MinisglError as error:
            self._complain(f"{error.code}: {error}")
            for line in self._server.take_lines() if self._server is not None else ():
                self._tell(without_controls(line))
            return
        result = stream.result
        for other in result.samples[1:]:
            self._console.print("---", style="dim")
            with MarkdownDisplay(self._console) as display:
                display.push(other.text)
        if result.text:
            self._conversation.add(question, result.text)
        self._console.print(_figures(result), style="dim")

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        command = _COMMANDS.get(name)
        if command is None:
            self._complain(f"no command {name}; /help lists them")
            return
        try:
            self._tell(command[1](self._conversation, rest.strip()))
        except click.UsageError as error:
            self._complain(error.message)
        except (OSError, ValueError) as error:
            self._complain(str(error))

    def _tell(self, text: str) -> None:
        self._console.print(escape(text), style="dim")

    def _complain(self, text: str) -> None:
        self._console.print(escape(text), style="red")


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter begins a new line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _figures(result: Result) -> str:
    """The line below an answer; without counts that the parameters do not ask for."""
    parts = [] if result.finish_reason == "stop" else [result.finish_reason or "stopped"]
    if result.first_delta_s is not None:
        if result.num_output_tokens is not None:
            tokens = sum(sample.num_output_tokens or 0 for sample in result.samples)
            parts.append(f"{tokens} tokens, {tokens / result.total_s:.1f} tokens/s")
        parts.append(f"first after {result.first_delta_s * 1000:.0f} ms")
        cached, whole = result.num_cached_tokens, result.num_input_tokens
        if cached is not None and whole is not None:
            parts.append(f"{cached} of {whole} prompt tokens cached")
    return " · ".join(parts)


def _help(_: Conversation, _rest: str) -> str:
    commands = [f"{name:8}  {text}" for name, (text, _) in _COMMANDS.items()]
    keys = ["Enter     send", "Alt-Enter new line", "Ctrl-C    stop the answer", "Ctrl-D    end"]
    return "\n".join([*commands, *keys])


def _reset(conversation: Conversation, _: str) -> str:
    conversation.turns.clear()
    return "forgotten"


def _system(conversation: Conversation, rest: str) -> str:
    if rest:
        conversation.system = None if rest == "-" else rest
    return f"system message: {conversation.system or 'none'}"


def _params(conversation: Conversation, rest: str) -> str:
    words = shlex.split(rest)
    unset = {word.removesuffix("=") for word in words if word.endswith("=")}
    asked = parameters_of([word for word in words if not word.endswith("=")])
    refuse_logprobs(asked)
    conversation.parameters |= asked
    if names_max_tokens(with_inner(asked)):  # in place of the one so far
        unset |= set(MAX_TOKENS) - asked.keys()
    for name in unset & conversation.parameters.keys():
        del conversation.parameters[name]
    return "\n".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in conversation.parameters.items()
    )


def _save(conversation: Conversation, rest: str) -> str:
    if not rest:
        raise click.BadParameter("/save needs a file")
    try:
        path = Path(rest).expanduser()
    except RuntimeError:
        raise click.BadParameter(f"{rest} begins with the home of nobody") from None
    conversation.save(path)
    return f"{len(conversation.turns)} messages in {path}"


def _quit(_: Conversation, _rest: str) -> str:
    raise EOFError


_COMMANDS: Final[Mapping[str, tuple[str, Callable[[Conversation, str], str]]]] = MappingProxyType(
    {
        "/help": ("this list", _help),
        "/reset": ("forget what was said, keep the system message", _reset),
        "/system": ("TEXT: set the system message; -: none; nothing: show it", _system),
        "/params": ("NAME=VALUE ...: set parameters; NAME=: unset; nothing: show them", _params),
        "/save": ("FILE: write the conversation as JSON", _save),
        "/quit": ("end", _quit),
    }
)
