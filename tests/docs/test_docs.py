"""Whatever README, CONTRIBUTING and docs/ name exists: links, files, commands and options."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from doctest import DocTestParser
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import click
import pytest

from minisgl_backend.cli.main import main
from tests.docs.markdown import Page

ROOT: Final = Path(__file__).parents[2]
PAGES: Final = [
    Page(path) for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"))
]
MADE_BY_READERS: Final = {"docker/api_key"}
_PACKAGES: Final = (ROOT, ROOT / "minisgl_backend", ROOT / "client", ROOT / "workbench")
_OPERATORS: Final = {"|", "&&", "||", ";", ">", "<", "&"}

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)


@pages
def test_links_lead_somewhere(page: Page) -> None:
    for link in page.links:
        if re.match(r"https?:|mailto:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.path.parent / name if name else page.path
        assert target.exists(), link
        assert not anchor or anchor in Page(target).anchors, link


@pages
def test_files_that_are_named_exist(page: Page) -> None:
    for code in page.inline:
        if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", code) and "/" in code:
            top = code.split("/")[0]
            if code in MADE_BY_READERS:
                continue
            places = [folder for folder in _PACKAGES if (folder / top).is_dir()]
            assert not places or any((folder / code).exists() for folder in places), code


_CLASS_OR_METHOD: Final = re.compile(r"([A-Z][a-z]\w*)(?:\.(\w+))?")


@pytest.mark.parametrize("name", ["architecture.md", "extending.md", "differences.md"])
def test_classes_that_are_named_exist(name: str) -> None:
    """In the text and in diagrams; a method is defined in the file of its class."""
    (page,) = [page for page in PAGES if page.path.name == name]
    words = {*page.inline, *_diagram_classes(page)}
    sources = [path.read_text("utf-8") for path in (ROOT / "minisgl_backend").rglob("*.py")]
    for named in filter(None, map(_CLASS_OR_METHOD.fullmatch, sorted(words))):
        of_class, method = named.groups()
        pattern = rf"^(class {of_class}\b|{of_class}: TypeAlias)"
        homes = [source for source in sources if re.search(pattern, source, re.M)]
        assert homes, of_class
        if method is not None:
            assert any(re.search(rf"def {method}\(", home) for home in homes), named.group()


def test_the_diagram_names_classes() -> None:
    (page,) = [page for page in PAGES if page.path.name == "architecture.md"]
    assert {"ModelExecutor", "ResponseStream", "TextStream"} <= _diagram_classes(page)


def _diagram_classes(page: Page) -> set[str]:
    """The CamelCase words in the labels of a page's diagrams."""
    labels = [
        label
        for block in page.blocks
        if block.language == "mermaid"
        for label in re.findall(r'"([^"]*)"', block.text)
    ]
    words = re.findall(r"\w+", " ".join(labels))
    return {word for word in words if re.search(r"[a-z][A-Z]", word)}


def calls(page: Page) -> Iterator[list[str]]:
    """The words of every command in console blocks, in indented blocks and in the text."""
    texts = [call.command for call in page.calls]
    texts += [code for code in page.inline if re.match(r"(minisgl|make|docker) [a-z]", code)]
    for block in page.blocks:
        if not block.language:
            texts += re.sub(r"\\\n\s*", " ", block.text).splitlines()
    for text in texts:
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            continue  # output, not a command
        while words:
            end = next((i for i, word in enumerate(words) if word in _OPERATORS), len(words))
            call, words = words[:end], words[end + 1 :]
            if call:
                yield [call[0].split("/")[-1], *call[1:]]


@pages
def test_commands_and_their_options_exist(page: Page) -> None:
    if page.path.name == "reference.md":  # generated from the options themselves
        return
    for program, *arguments in calls(page):
        if program == "minisgl":
            check_options(main, arguments)
        elif program == "make":
            check_make(arguments)
        elif program in ("docker", "kubectl"):
            check_container(arguments)


def check_options(command: click.Command, arguments: list[str]) -> None:
    """Follow the subcommands, then look up every option of the last one.

    After ``--`` come the options of the server that `minisgl chat` starts.
    """
    if "--" in arguments:
        cut = arguments.index("--")
        check_options(main, ["serve", *arguments[cut + 1 :]])
        arguments = arguments[:cut]
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name, *arguments = arguments
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"{command.name} has no command {name}"
        command = found
    known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    if not isinstance(command, click.Group):
        given = {word.split("=")[0] for word in arguments if re.match(r"--?[a-zA-Z]", word)}
        assert given <= known, f"{command.name} has no {', '.join(sorted(given - known))}"


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    for word in arguments:
        name, is_variable, value = word.partition("=")
        assert is_variable or name in targets, f"make has no {name}"
        if name == "ARGS" and arguments[0] == "serve":
            check_options(main, ["serve", *shlex.split(value)])


def check_container(arguments: list[str]) -> None:
    """Files after ``-f`` exist, and what our images are to run is one of our commands."""
    for flag, value in pairwise(arguments):
        assert flag != "-f" or (ROOT / value).is_file(), value
    image = next((i for i, word in enumerate(arguments) if word.startswith("minisgl:")), None)
    if arguments[0] == "run" and image is not None:
        check_options(main, arguments[image + 1 :])


def test_unknown_commands_and_options_would_be_found() -> None:
    with pytest.raises(AssertionError, match="no command seve"):
        check_options(main, ["seve"])
    with pytest.raises(AssertionError, match="has no --modle"):
        check_options(main, ["serve", "--modle", "x"])
    with pytest.raises(AssertionError, match="serve has no --modle"):
        check_options(main, ["chat", "--model", "x", "--", "--modle"])
    with pytest.raises(AssertionError, match="make has no tset"):
        check_make(["tset"])
    with pytest.raises(AssertionError, match="no --modle"):
        check_container(["run", "--rm", "minisgl:cpu", "serve", "--modle", "x"])


@pages
def test_python_examples_are_python(page: Page) -> None:
    for block in page.blocks:
        if block.language != "python" or block.text.startswith("# minisgl_backend/"):
            continue
        sources = [block.text]
        if block.text.startswith(">>> "):
            sources = [example.source for example in DocTestParser().get_examples(block.text)]
        for source in sources:
            compile(source, str(page.path), "exec")


def test_the_readme_leads_to_every_page() -> None:
    """Each page of docs/ can be reached from the README."""
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop().resolve()
        if path not in reached and path.suffix == ".md":
            reached.add(path)
            links = [link.split("#")[0] for link in Page(path).links if "://" not in link]
            waiting += [path.parent / link for link in links if link]
    assert {page.path.resolve() for page in PAGES} <= reached


def _figures(name: str) -> Any:
    return json.loads((ROOT / "docs" / "figures" / f"{name}.json").read_text("utf-8"))


def test_figures_of_the_readme_are_in_files() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    throughputs = [
        _figures(name)["tokens_per_s"]
        for name in (
            "offline-qwen3-0.6b",
            "offline-qwen3-0.6b-fp8",
            "server-qwen3-0.6b",
            "tensor-parallel-offline-qwen3-14b",
        )
    ]
    for tokens_per_s in throughputs:
        assert f"{round(tokens_per_s, -2):,.0f}" in text
    assert f"{_figures('prefill-qwen3-0.6b')['rows'][0]['median_ms']:.1f} ms" in text


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-14b"])
def test_decode_steps_of_the_page_are_those_of_the_file(model: str) -> None:
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    for row in _figures(f"decode-{model}")["rows"]:
        assert f"| {row['batch']} | {row['step_ms']:.2f} | {row['replay_ms']:.2f} |" in text


@pages
def test_code_that_is_quoted_is_in_its_file(page: Page) -> None:
    """A Python example that begins with the path of a file is an excerpt of it."""
    for block in page.blocks:
        first, _, rest = block.text.partition("\n")
        if re.fullmatch(r"# [\w/]+\.py", first):
            assert rest in (ROOT / first[2:]).read_text("utf-8"), f"{first[2:]} reads otherwise"
