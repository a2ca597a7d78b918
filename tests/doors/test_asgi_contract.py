"""The ASGI middleware keeps the door contract under every server and in every framework, on real sockets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from .contract import DoorContract, OtherPairContract
from .servers import AsgiServer

OTHER_FRAMEWORKS = ["starlette-between", "fastapi", "litestar", "quart", "django"]
OTHER_PAIRS = [
    ("uvicorn-h11", "starlette"),  # uvicorn's other parser of HTTP, and asyncio's own loop
    ("hypercorn", "starlette"),
    ("granian", "starlette"),
    *(("uvicorn", framework) for framework in OTHER_FRAMEWORKS),
    *itertools.product(["hypercorn", "granian"], ["fastapi", "litestar", "quart", "django"]),
]


class TestUvicornStarlette(DoorContract):
    """Every case; the middleware is one of Starlette's own."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls) -> Iterator[str]:
        with AsgiServer("uvicorn", "starlette") as running:
            yield running.url


class TestEveryOtherPair(OtherPairContract):  # type: ignore[misc, valid-type]
    """The cases in which servers and frameworks differ.

    One case is left out, even with FULL=1: Litestar, Quart and Django answer an exception with a page, and do not pass it
    to an outer middleware.
    """

    test_exception_in_doubt_is_not_repeated = None

    @pytest.fixture(scope="class", params=OTHER_PAIRS, ids="-".join)
    @classmethod
    def url(cls, request: pytest.FixtureRequest) -> Iterator[str]:
        with AsgiServer(*request.param) as running:
            yield running.url
