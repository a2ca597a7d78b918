"""Tests that every HTTP middleware must pass: subclass DoorContract, and serve the contract's app.

class TestMyDoor(DoorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls):
        app = ContractApp("sqlite://")
        with serve(IdempotencyMiddleware(rendered(app), guard=app.guard, contract=app.contract)) as port:
            yield f"http://127.0.0.1:{port}"

The server must be a real one: the tests use sockets only, and some of them close their connection in mid-request.  See
`app` for the app, and for the requirements on its server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before they are imported, so that a failing assertion shows its values.
pytest.register_assert_rewrite(
    *(f"{__package__}.{part}" for part in ("bodies", "caller", "crashes", "faults", "keys", "lifecycle", "requests"))
)

from .bodies import BodyCases  # noqa: E402
from .caller import Caller  # noqa: E402
from .crashes import CrashCases  # noqa: E402
from .faults import FaultCases  # noqa: E402
from .keys import HeaderLineCases, KeyCases  # noqa: E402
from .lifecycle import LifecycleCases  # noqa: E402
from .requests import RequestCases  # noqa: E402

__all__ = [
    "BodyCases",
    "Caller",
    "CrashCases",
    "DoorContract",
    "FaultCases",
    "KeyCases",
    "LifecycleCases",
    "OtherPairContract",
    "RequestCases",
    "ServerCases",
]

FULL = os.environ.get("ONCEMORE_FULL", "") not in ("", "0")  # `make test FULL=1`


class Served:
    """The fixtures of all cases: a caller of the app at `url`."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls) -> str:
        raise NotImplementedError("Give a fixture `url` that serves the contract's app through your door")

    @pytest.fixture
    def caller(self, url: str) -> Iterator[Caller]:
        """A client with credentials, a key and a case of its own."""
        with Caller(url) as caller:
            yield caller


class DoorContract(Served, KeyCases, RequestCases, LifecycleCases, BodyCases, FaultCases):
    """All cases.  One pair of server and framework for each middleware runs them."""


class ServerCases(Served, HeaderLineCases, BodyCases):
    """The cases in which servers and frameworks differ: header lines, messages, streams, and clients that leave."""


# For a pair whose integration and ledger another pair has shown to keep the whole contract.
OtherPairContract: type[Served] = DoorContract if FULL else ServerCases
