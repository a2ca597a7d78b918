"""What every HTTP door must do, as tests: subclass DoorContract, serve the contract's app, and pytest does the rest.

class TestMyDoor(DoorContract):
    @pytest.fixture(scope="class")
    @classmethod
    def url(cls):
        app = ContractApp("sqlite://")
        with serve(IdempotencyMiddleware(rendered(app), guard=app.guard, contract=app.contract)) as port:
            yield f"http://127.0.0.1:{port}"

The server must be a real one: the tests speak to it through sockets only, and some of them leave in mid-sentence.  See
`app` for the app, and for what its server must be able to do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

# Before they are imported, so that a failing assertion shows its values.
pytest.register_assert_rewrite(
    *(
        f"{__package__}.{part}"
        for part in ("bodies", "caller", "crashes", "faults", "keys", "lifecycle", "requests")
    )
)

from .bodies import BodyCases  # noqa: E402
from .caller import Caller  # noqa: E402
from .crashes import CrashCases  # noqa: E402
from .faults import FaultCases  # noqa: E402
from .keys import KeyCases  # noqa: E402
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
    "RequestCases",
]


class DoorContract(KeyCases, RequestCases, LifecycleCases, BodyCases, FaultCases):
    """The cases of parts A, B and C that a door can show; the number of each is in its docstring."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls) -> str:
        raise NotImplementedError("Give a fixture `url` that serves the contract's app through your door")

    @pytest.fixture
    def caller(self, url: str) -> Iterator[Caller]:
        """Someone with credentials, a key and a case of its own."""
        with Caller(url) as caller:
            yield caller
