"""`principal=jwt(...)`: keys belong to the verified subject of a token, in every framework."""

from __future__ import annotations

import time
from typing import Any

import jwt as pyjwt
import pytest

from oncemore import Guard
from oncemore._runtime.plan import run
from oncemore.errors import ConfigurationError
from oncemore.web.asgi import IdempotencyMiddleware
from oncemore.web.jwt import jwt
from oncemore.web.request import principal_of
from oncemore.web.wsgi.environ import request_of

from .wire import Counted, Wire

KEY, OTHER = "k" * 32, "o" * 32
BY_SUBJECT = jwt("sub", key=KEY, algorithms=["HS256"])


def token(key: str = KEY, **claims: Any) -> str:
    return pyjwt.encode({"exp": time.time() + 60, "sub": "alice", **claims}, key, "HS256")


async def ask(door: Any, authorization: str, key: str = "k") -> Wire:
    wire = Wire(key=key)
    wire.scope["headers"] = [field for field in wire.scope["headers"] if field[0] != b"authorization"]
    wire.scope["headers"] += [(b"authorization", authorization.encode())] if authorization else []
    return await wire.through(door)


async def test_jwt_renewed_token_of_one_subject_replays() -> None:
    app = Counted()
    door = IdempotencyMiddleware(app, guard=Guard("memory://"), principal=BY_SUBJECT)
    answers = [
        await ask(door, f"Bearer {token(jti='1')}"),
        await ask(door, f"bearer {token(jti='2')}"),
        await ask(door, f"Bearer {token(sub='bob')}"),
    ]
    assert [answer.said for answer in answers] == ["stored", "replayed", "stored"]
    assert app.runs == 2


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Basic YWxpY2U6cHc=",
        "Bearer nonsense",
        f"Bearer {token(OTHER)}",
        f"Bearer {token(exp=time.time() - 60)}",
        f"Bearer {pyjwt.encode({'sub': 'alice'}, None, 'none')}",
        f"Bearer {token(sub='')}",
        f"Bearer {pyjwt.encode({'name': 'alice'}, KEY, 'HS256')}",
    ],
)
async def test_jwt_unverified_token_gets_401_and_no_replay(authorization: str) -> None:
    """A stored response is sent before the app verifies anything, so a forged subject must not get it."""
    app = Counted()
    door = IdempotencyMiddleware(app, guard=Guard("memory://"), principal=BY_SUBJECT)
    assert (await ask(door, f"Bearer {token()}")).said == "stored"
    assert ((await ask(door, authorization)).status, app.runs) == (401, 1)


def test_jwt_reads_the_headers_of_a_wsgi_request() -> None:
    environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_AUTHORIZATION": f"Bearer {token()}"}
    assert run(principal_of(BY_SUBJECT, request_of(environ))) == "user:alice"


def test_jwt_older_key_of_a_rotation_verifies() -> None:
    rotated = jwt("sub", key=[OTHER, KEY], algorithms=["HS256"])
    assert rotated([("authorization", f"Bearer {token()}")]) == "alice"


@pytest.mark.parametrize("algorithms", [[], ["none"], "HS256"])
def test_jwt_without_algorithms_is_refused(algorithms: Any) -> None:
    with pytest.raises(ConfigurationError, match="verifies nothing"):
        jwt("sub", key=KEY, algorithms=algorithms)


def test_jwt_without_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="key is empty"):
        jwt("sub", key="", algorithms=["HS256"])
