"""`minisgl generate`: one answer as it comes, or a file of answers to a file of requests.

Exit codes: 0; 1 if a request failed or its answer was cut off; 2 for wrong usage; 130 after Ctrl-C,
which cancels what is under way. Must not know a protocol, or which values the server takes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from minisgl_client import AsyncClient, Client, InvalidArgument, MinisglError, Result, strict_json
from minisgl_client.cli.display import without_controls
from minisgl_client.cli.lines import in_order, lines_of
from minisgl_client.cli.request_options import (
    MAX_TOKENS,
    client_of,
    form_of,
    form_options,
    given,
    names_max_tokens,
    parameter_options,
    refuse_logprobs,
    server_options,
    with_fitting,
    with_form,
    with_inner,
)


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "-f",
    "--file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="read the prompt from it; standard input if neither is given",
)
@click.option(
    "-n", "--num-samples", "n", type=int, help="answers to the prompt; lines of --- between them"
)
@click.option("--chat", is_flag=True, help="the prompt is a message of a chat")
@click.option("--system", metavar="TEXT", help="a system message before it; implies --chat")
@click.option(
    "--jsonl",
    is_flag=True,
    help="each line of the input is a request and becomes a line of the output: a JSON string, or "
    "an object of prompt, messages or input_ids, id, tools, and any parameters",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="requests at a time with --jsonl",
)
@form_options
@parameter_options(max_tokens=256)
@server_options
def generate(
    prompt: str | None,
    file: Path | None,
    n: int | None,
    chat: bool,
    system: str | None,
    jsonl: bool,
    concurrency: int,
    json_schema: Path | None,
    regex: str | None,
    choice: Sequence[str],
    grammar: Path | None,
    url: str,
    ensemble: str,
    timeout_s: float | None,
    **parameters: Any,
) -> None:
    """Generate from a prompt, a file or standard input."""
    if prompt is not None and (file is not None or jsonl):
        raise click.UsageError("give a prompt, or a file or standard input")
    context = click.get_current_context()
    if not jsonl and context.get_parameter_source("concurrency") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--concurrency needs --jsonl")
    if sys.stdout is None:
        raise click.ClickException("standard output is closed")
    settings = {"url": url, "model": ensemble, "timeout_s": timeout_s}
    form = form_of(json_schema, regex, choice, grammar)
    asked = with_fitting(with_form(form, given(**parameters)))
    if n is not None and asked.setdefault("n", n) != n:
        raise click.UsageError("-n and --param n have different values")
    if not jsonl:
        refuse_logprobs(asked)
    template = _Template(asked, chat or system is not None, system)
    try:
        if jsonl:
            sys.exit(asyncio.run(_answer_lines(settings, template, file, concurrency)))
        _answer_one(settings, template, _text(file) if prompt is None else prompt)
    except MinisglError as error:
        raise click.ClickException(f"{error.code}: {error}") from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the rest of the buffer may go
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        raise click.ClickException(str(error)) from None


@dataclasses.dataclass(frozen=True)
class _Template:
    """How to turn a prompt into a request."""

    parameters: Mapping[str, Any]
    chat: bool
    system: str | None

    def fill(self, prompt: str) -> dict[str, Any]:
        """The arguments of the client's methods."""
        if not self.chat:
            return {"prompt": prompt, **self.parameters}
        messages = [{"role": "user", "content": prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return {"messages": messages, **self.parameters}


def _text(file: Path | None) -> str:
    """All of a file or of standard input, without the final newline."""
    source = _source(file)
    if source == 0 and os.isatty(0):
        raise click.UsageError("give a prompt, a file, or something on standard input")
    with open(source, "rb", closefd=source != 0) as stream:
        data = stream.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"the prompt must be valid UTF-8: {error}") from None


def _source(file: Path | None) -> Path | int:
    """What to open: the file, or standard input by its descriptor."""
    if file is not None and str(file) != "-":
        return file
    if sys.stdin is None:
        raise click.ClickException("standard input is closed")
    return 0


def _write(text: str) -> None:
    """Write to standard output, in UTF-8 whatever the locale; a terminal gets no control
    characters.

    A lone surrogate can come from JSON, and is written as a JSON escape.
    """
    shown = without_controls(text) if os.isatty(1) else text
    click.echo(shown.encode(errors="backslashreplace"), nl=False)


def _answer_one(settings: Mapping[str, Any], template: _Template, prompt: str) -> None:
    """Write the answer as it comes, and a newline; of several, those after the first at the end.
    An embedding, beside which there is no text, is a line of JSON."""
    request = template.fill(prompt)
    # the server streams neither the best answers nor a prompt
    within = with_inner(request)
    is_whole = "best_of" in within or within.get("exclude_input_in_output") is False
    with client_of(Client, **settings) as client:
        if is_whole:
            result = client.generate(**request)
            _write(result.text)
        else:
            with client.stream(**request) as stream:
                for delta in stream:
                    if delta.sample == 0:
                        _write(delta.text)
            result = stream.result
    _write(f"{json.dumps(result.embedding)}\n" if result.embedding else "\n")
    for other in result.others:
        _write(f"---\n{other.text}\n")
    if cut := [sample for sample in result.samples if _is_cut(sample)]:
        raise click.ClickException(f"the answer was cut: {cut[0].finish_reason}")


def _is_cut(result: Result) -> bool:
    """Whether an answer ended before the model ended it or the requested length was reached."""
    return result.finish_reason not in ("stop", "length", None)  # None: it was not asked for


async def _answer_lines(
    settings: Mapping[str, Any], template: _Template, file: Path | None, concurrency: int
) -> int:
    """Write an answer for each line; returns the exit code."""
    num_failed = 0

    async def answer(line: bytes) -> str:
        nonlocal num_failed
        told: dict[str, Any] = {}
        try:
            request = _request(line, template)
            if "id" in request:
                told["id"] = request.pop("id")
            request_id = "" if told.get("id") is None else str(told["id"])
            result = await client.generate(request_id=request_id, **request)
            told |= _shown(result)
            num_failed += any(_is_cut(sample) for sample in result.samples)
            advance(sum(sample.num_output_tokens or 0 for sample in result.samples))
        except MinisglError as error:
            num_failed += 1
            told["error"] = {"code": error.code, "message": str(error)}
            advance(0)
        return json.dumps(told, ensure_ascii=False, default=list) + "\n"  # bytes as numbers

    with _progress(file) as advance:
        async with client_of(AsyncClient, **settings) as client:
            lines = (line async for line in lines_of(_source(file)) if line.strip())
            await in_order(lines, answer, _write, concurrency=concurrency)
    return 1 if num_failed else 0


_MAX_TOKENS: Final = dict.fromkeys(MAX_TOKENS)
"""What leaves out the command's own, under either name."""


def _request(line: bytes, template: _Template) -> dict[str, Any]:
    """The arguments that a line gives, and the command's own for those that it leaves out."""
    try:
        said = strict_json.loads(line.decode("utf-8-sig"))
    except strict_json.Refused as error:
        raise InvalidArgument(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the line is not JSON: {error}") from None
    if isinstance(said, str):
        return template.fill(said)
    if not isinstance(said, dict):
        raise InvalidArgument("a line must be a JSON string or an object")
    if "request_id" in said:  # an argument of ours, not of the server
        raise InvalidArgument("unknown parameter 'request_id'; did you mean 'id'?")
    within = with_inner(said)
    if names_max_tokens(within):
        said = {**_MAX_TOKENS, "fit_max_tokens": within.get("fit_max_tokens", False), **said}
    elif within.get("embed") is True:  # the command's are for lines that generate
        said |= _MAX_TOKENS
    if isinstance(prompt := said.get("prompt"), str):
        del said["prompt"]
        return template.fill(prompt) | said
    return {**template.parameters, **said}


def _shown(result: Result) -> dict[str, Any]:
    """What a line of output says about an answer: what depends on neither clock nor connection.
    The samples after the first are its ``others``."""
    shown = dataclasses.asdict(dataclasses.replace(result, others=()))
    for name in ("request_id", "first_delta_s", "total_s"):
        del shown[name]
    shown["others"] = tuple(_shown(other) for other in result.others)
    return {name: value for name, value in shown.items() if value not in (None, ())}


@contextmanager
def _progress(file: Path | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, if that is a terminal; yields a function that counts an answer's
    tokens."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _tokens: None
        return
    total = None
    if file is not None and file.is_file():
        with file.open("rb") as lines:
            total = sum(1 for line in lines if line.strip())
    with Progress(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
        console=console,
        redirect_stdout=sys.stdout.isatty(),
    ) as progress:
        task = progress.add_task("", total=total, tokens=0)
        tokens = 0

        def advance(num_tokens: int) -> None:
            nonlocal tokens
            tokens += num_tokens
            progress.update(task, advance=1, tokens=tokens)

        yield advance
