"""The images are built by the Makefile's own verbs, pinned, and run without root.

No Docker engine is needed: what a RUN step does is what `make` does here, and the rest is linted.
"""

from __future__ import annotations

import json
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docker.conftest import DOCKER, ROOT, tool
from tests.docker.constraints import pinned
from tests.docker.dockerfile import stages, texts

PYTHONS: Final = {"cpu": "3.11", "gpu": "3.12"}
"""The Python versions of the base images."""
IMAGES: Final = {"cpu": DOCKER / "Dockerfile.cpu", "gpu": DOCKER / "Dockerfile"}
MAKEFILE: Final = (ROOT / "Makefile").read_text("utf-8")
PROJECT: Final = metadata.distribution("minisgl-triton")
_VARIABLE: Final = re.compile(r"^([A-Z]+) [:?]?= ", re.M)
_TARGET: Final = re.compile(r"^([a-z]+|\$\(VENV\)/\.\w+):", re.M)
"""``target: ...`` of the Makefile."""

images = pytest.mark.parametrize("image", IMAGES)


def commands(image: str) -> list[str]:
    """Each command of the RUN steps."""
    runs = [text for stage in stages(IMAGES[image]) for text in texts(stage, "RUN")]
    return [part.strip() for text in runs for part in text.split("&&")]


def make_calls(image: str) -> list[tuple[str, dict[str, str]]]:
    """The target and variables of each call of make."""
    calls = []
    for command in commands(image):
        if command.startswith("make "):
            _, target, *rest = command.split()
            calls.append((target, dict(word.split("=", 1) for word in rest)))
    return calls


def pins(image: str) -> dict[str, str]:
    """The version of every package in the image."""
    (stack,) = {given["STACK"] for _, given in make_calls(image)}
    return pinned(stack, PYTHONS[image])


@images
def test_hadolint_finds_nothing(image: str) -> None:
    done = subprocess.run(
        [tool("hadolint"), str(IMAGES[image])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@images
def test_run_steps_are_the_makefiles(image: str) -> None:
    """Apart from preparing the system, an image does nothing that `make install` does not do."""
    preparation = r"apt-get (update|install)|rm -rf /var/lib/apt/lists|useradd |install -d "
    rest = [text for text in commands(image) if not re.match(preparation, text)]
    assert rest
    assert [text for text in rest if not text.startswith("make ")] == []


@images
def test_make_has_the_targets_and_variables_that_images_use(image: str) -> None:
    variables, targets = set(_VARIABLE.findall(MAKEFILE)), set(_TARGET.findall(MAKEFILE))
    for target, given in make_calls(image):
        assert set(given) <= variables
        assert target.replace(given["VENV"] + "/", "$(VENV)/") in targets
        assert (ROOT / "constraints" / f"{given['STACK']}.txt").is_file()


@images
def test_make_would_do_for_the_image_what_it_does_here(image: str, tmp_path: Path) -> None:
    """The commands behind each RUN step are those of `make install`, except for given names."""
    for target, given in make_calls(image):
        here = dry_run("install", {"VENV": str(tmp_path), "STACK": given["STACK"]})
        there = dry_run(
            target.replace(given["VENV"], str(tmp_path)), {**given, "VENV": str(tmp_path)}
        )
        assert there
        natively = {without_names(line) for line in here}
        assert {without_names(line) for line in there} <= natively


def dry_run(target: str, variables: dict[str, str]) -> list[str]:
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "--dry-run", "--always-make", "-C", str(ROOT), "--no-print-directory"]
    done = subprocess.run([*command, target, *given], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def without_names(line: str) -> str:
    """A command without the versions, extras and constraints it is given."""
    return re.sub(r"torch \d\S*|torch==[\d.]+|-c \S+|'\.\[.*\]'", "", line)


@images
def test_extras_of_an_image_are_the_projects(image: str) -> None:
    (extras,) = {given["EXTRAS"] for _, given in make_calls(image) if "EXTRAS" in given}
    assert set(extras.split(",")) <= set(PROJECT.metadata.get_all("Provides-Extra", []))


def requirements(extras: list[str]) -> list[Requirement]:
    """What the project and these extras need."""
    return [
        requirement
        for requirement in map(Requirement, PROJECT.requires or ())
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in extras)
    ]


@images
def test_every_package_of_an_image_is_pinned_as_the_project_needs(image: str) -> None:
    versions = pins(image)
    (extras,) = {given["EXTRAS"] for _, given in make_calls(image) if "EXTRAS" in given}
    for requirement in requirements(extras.split(",")):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not pinned"
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"


@images
def test_base_images_are_pinned(image: str) -> None:
    for stage in stages(IMAGES[image]):
        name = texts(stage, "FROM")[0].split()[0]
        assert re.search(r":\d+\.\d+", name), name


@images
def test_the_last_stage_runs_without_root_and_asks_for_a_token(image: str) -> None:
    *_, last = stages(IMAGES[image])
    user = texts(last, "USER")
    assert user == ["1000:1000"]
    (check,) = texts(last, "HEALTHCHECK")
    program = json.loads(check.partition("CMD ")[2])
    assert Path("/opt/minisgl/docker/healthcheck.py") == Path(program[1])
    assert texts(last, "ENTRYPOINT") == ['["minisgl"]']


def test_images_get_what_the_build_needs_and_no_more() -> None:
    rules = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in rules
    allowed = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert all((ROOT / name).exists() for name in allowed)
    assert allowed.isdisjoint({".git", ".venv", "tests"})
    for path in IMAGES.values():
        for stage in stages(path):
            for copied in texts(stage, "COPY"):
                sources = copied.split()[:-1]
                for source in sources:
                    if not source.startswith("--") and source not in (".", "/opt/minisgl"):
                        assert source.split("/")[0] in allowed
