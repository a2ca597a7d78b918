"""`oncemore webhooks listen`: receive webhooks on this machine while you develop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import click

from ..._ledger.context import Op
from ..._ledger.guard import Guard
from ...errors import ConfigurationError
from ...messages.envelope import Envelope
from ...messages.inbox import Inbox
from ...webhooks.receiver import Receiver
from ...webhooks.schemes import SCHEMES
from ...webhooks.signature import new_secret
from .options import json_option
from .output import Output, escape

SECRETS = "ONCEMORE_WEBHOOK_SECRETS"


@click.command(short_help="receive, verify and print webhooks on this machine")
@click.option("--scheme", type=click.Choice(list(SCHEMES)), default="standard", show_default=True, help="Who signs.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    envvar=SECRETS,
    show_envvar=True,
    help="A secret that may have signed; may be repeated.  Without one, a Standard Webhooks secret is made and printed.",
)
@click.option(
    "--option", "options", multiple=True, metavar="NAME=VALUE", help="An option of the scheme: id_header=X-Event-Id."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=8000, show_default=True, help="The port to listen on; 0 takes a free one.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after this many requests, instead of at Ctrl-C.")
@json_option
@click.pass_obj
def listen(
    output: Output,
    scheme: str,
    secrets: tuple[str, ...],
    options: tuple[str, ...],
    host: str,
    port: int,
    count: int | None,
) -> None:
    """Receive webhooks on this machine, verify them, and print each with the answer that it got.

    Nothing is stored: duplicates are recognised until the command ends.  With --json, each is one line of JSON.
    """
    if not secrets and scheme in ("standard", "svix"):
        secrets = (new_secret(),)
        click.echo(f"Sign with {secrets[0]}", err=True)
    listener = WebhookPrinter(scheme, secrets, read_options(options), show_json if output.json else show_text)
    try:
        server = make_server(host, port, listener, ListeningServer, QuietHandler)
    except OSError as error:
        raise ConfigurationError(
            f"{host}:{port} cannot be listened on: {error.strerror}; choose another --port"
        ) from error
    with server:
        click.echo(f"Listening for {scheme} webhooks at http://{host}:{server.server_port}; stop with Ctrl-C", err=True)
        try:
            while count is None or listener.answered < count:
                server.handle_request()
        except KeyboardInterrupt:
            if count is not None:
                raise
            # Without --count, an interrupt is the ordinary end.


class ListeningServer(ThreadingMixIn, WSGIServer):
    """Serves each connection on a thread of its own, so that one that is left open does not block the others."""

    daemon_threads = True
    timeout = 0.2  # seconds after which `handle_request` returns, to see whether the command is to end


class QuietHandler(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class WebhookPrinter:
    """A WSGI app that prints the webhooks that its receiver gets, and the answers."""

    def __init__(
        self,
        scheme: str,
        secrets: tuple[str, ...],
        options: dict[str, str],
        show: Callable[[str, dict[str, Any], Envelope | None], None],
    ) -> None:
        inbox = Inbox(Guard("memory://"), effect="lease")
        self._receiver = Receiver(inbox, scheme, secrets=secrets, handler=self._handle, **options)
        self._show = show
        self._current = threading.local()  # the event that is being handled on this thread
        self._printing = threading.Lock()
        self.answered = 0

    def _handle(self, op: Op, event: Envelope) -> None:
        self._current.event = event

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self._current.event = None
        lines: list[str] = []

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            lines.append(status)
            return start_response(status, headers, *more)

        body = b"".join(self._receiver.wsgi(environ, start))
        try:
            answer = json.loads(body)
        except ValueError:  # the challenge of a sender
            answer = {"result": "challenge answered"}
        with self._printing:
            self._show(lines[0].partition(" ")[0], answer, self._current.event)
        return AnswerBody([body], self._count)

    def _count(self) -> None:
        with self._printing:
            self.answered += 1


class AnswerBody(list[bytes]):
    """The body of an answer.  The server closes it when it has sent it; the command may end then, but not before."""

    def __init__(self, chunks: list[bytes], sent: Callable[[], None]) -> None:
        super().__init__(chunks)
        self.close = sent


def show_text(status: str, answer: dict[str, Any], event: Envelope | None) -> None:
    said = answer.get("result") or answer.get("detail", "")
    named = [answer.get("event_id", ""), event.type if event is not None else ""]
    click.echo(escape(" ".join(filter(None, [status, said, *named]))))
    if event is not None:
        click.echo(escape(json.dumps(event.data, indent=2, ensure_ascii=False), keep_lines=True))


def show_json(status: str, answer: dict[str, Any], event: Envelope | None) -> None:
    found = {"status": int(status), "answer": answer}
    if event is not None:
        found |= {"id": event.id, "type": event.type, "data": event.data}
    click.echo(json.dumps(found))


def read_options(words: tuple[str, ...]) -> dict[str, str]:
    """Return the options of the scheme, each written as name=value."""
    pairs = [word.partition("=") for word in words]
    for name, mark, _ in pairs:
        if not mark:
            raise ConfigurationError(f"--option {name}: write it as name=value, such as id_header=X-Event-Id")
    return {name: value for name, _, value in pairs}
