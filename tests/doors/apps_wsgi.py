"""The door contract's app as a plain WSGI app and in Flask, behind the WSGI door; and what gunicorn imports of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from flask import Flask, Response, request

from oncemore._runtime.plan import run
from oncemore.web.wsgi import IdempotencyMiddleware

from .app import ContractApp

METHODS = ["GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"]


def plain(contract_app: ContractApp) -> Any:
    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        headers = [(name[5:].replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_")]
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        asked = (environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"], headers, body)
        reply = run(contract_app.perform(*asked))
        start_response(f"{reply.status} As It Is", list(reply.headers))
        return reply.chunks() if reply.streamed else [reply.body]

    return IdempotencyMiddleware(app, guard=contract_app.guard, contract=contract_app.contract)


def flask(contract_app: ContractApp) -> Flask:
    app = Flask(__name__, static_folder=None)

    @app.route("/<path:path>", methods=METHODS, provide_automatic_options=False)
    def view(path: str) -> Response:
        query = request.query_string.decode("latin-1")
        asked = (request.method, request.path, query, list(request.headers.items()), request.get_data())
        reply = run(contract_app.perform(*asked))
        made = Response(reply.chunks() if reply.streamed else reply.body, reply.status)
        made.headers.pop("content-type")
        made.headers.extend(list(reply.headers))
        return made

    app.wsgi_app = IdempotencyMiddleware(app.wsgi_app, guard=contract_app.guard, contract=contract_app.contract)  # type: ignore[method-assign]
    return app


FRAMEWORKS: dict[str, Callable[[ContractApp], Any]] = {"plain": plain, "flask": flask}


def make() -> Any:
    """The app that the environment asks for."""
    return FRAMEWORKS[os.environ["FRAMEWORK"]](ContractApp(os.environ["STORE"]))
