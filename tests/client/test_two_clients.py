"""The client and the asynchronous one have the same methods."""

from __future__ import annotations

import inspect

import pytest
from minisgl_client import AsyncClient, Client

NAMES = sorted(name for name in vars(Client) if not name.startswith("_") and name != "close")


@pytest.mark.parametrize("name", NAMES)
def test_methods_take_the_same_arguments(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (Client, AsyncClient))
    assert ours.parameters == theirs.parameters


def test_neither_has_a_method_that_the_other_lacks() -> None:
    theirs = {name for name in vars(AsyncClient) if not name.startswith("_")}
    assert theirs - {"aclose"} == set(NAMES)


def test_both_are_made_alike() -> None:
    assert inspect.signature(Client) == inspect.signature(AsyncClient)
