"""`oncemore webhooks`: send webhooks, look after endpoints and deliveries, and receive webhooks while you develop."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import click

from ..._ledger.context import Op
from ..._ledger.guard import Guard
from ...errors import ConfigurationError
from ...messages.envelope import Envelope
from ...messages.inbox import Inbox
from ...webhooks.endpoints import State
from ...webhooks.receiver import Receiver
from ...webhooks.schemes import SCHEMES
from ...webhooks.signature import new_secret
from ...webhooks.webhooks import STATES, DeliveryState, Only, Webhooks
from .options import json_option, load_object, on_ledger, open_ledger, read_duration, run_or_once, seal_from_environment
from .output import Output, escape, print_table, struct_fields

tenant_option = click.option("--tenant", metavar="NAME", help="Only those of this tenant.")
limit_option = click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="The most rows.")


@click.group()
def webhooks() -> None:
    """Send webhooks, look after their deliveries, and receive some while you develop."""


@webhooks.command("run", short_help="deliver webhooks until SIGTERM or Ctrl-C")
@click.argument("place", metavar="MODULE:NAME")
@click.option("--once", is_flag=True, help="Deliver what is due now, instead of running until SIGTERM or Ctrl-C.")
@json_option
@click.pass_obj
def run_sender(output: Output, place: str, once: bool) -> None:
    """Deliver webhooks, with the Sender or the Webhooks that MODULE:NAME names.

    Any number of processes may do so.  SIGTERM lets the requests that are under way be finished first.
    """
    from ...webhooks.sender import Sender  # it needs aiohttp, and the other commands do not

    found: Any = load_object(place, "a Sender or Webhooks")
    if isinstance(found, Webhooks):
        found = Sender(found)
    if not isinstance(found, Sender):
        raise ConfigurationError(
            f"{place!r} is a {type(found).__name__}, not a Sender or Webhooks of oncemore: write module:name of one"
        )
    run_or_once(output, found, once, "delivered", "Delivered {:,}.")


@webhooks.command(short_help="list endpoints")
@tenant_option
@click.option("--state", type=click.Choice(["enabled", "disabled"]), help="Only those in this state.")
@limit_option
@click.option("--after", default="", metavar="ID", help="Continue behind the endpoint with this id.")
@on_ledger
def endpoints(output: Output, url: str | None, tenant: str | None, state: State | None, limit: int, after: str) -> None:
    """List endpoints.  Secrets and the values of headers are never shown."""
    with opened_webhooks(url) as found:
        page = found.endpoints.list(tenant=tenant, state=state, limit=limit, after=after)
    data = [struct_fields(each, "secret", "headers") for each in page]
    heads = ("id", "tenant", "url", "events", "state", "failing since", "reason")
    rows = [
        (each["id"], each["tenant"], each["url"], ", ".join(each["events"]), each["state"], each["failing_since"], each["reason"])
        for each in data
    ]  # fmt: skip
    output.show(data, lambda: print_table(heads, rows))


@webhooks.command(short_help="list deliveries")
@click.option("--endpoint", metavar="ID", help="Only those for this endpoint.")
@tenant_option
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@click.option("--type", "type_", metavar="TYPE", help="Only events of this type.")
@limit_option
@click.option("--after", default="0", metavar="ID", help="Continue behind the delivery with this id.")
@on_ledger
def deliveries(
    output: Output,
    url: str | None,
    endpoint: str | None,
    tenant: str | None,
    state: DeliveryState | None,
    type_: str | None,
    limit: int,
    after: str,
) -> None:
    """List deliveries, the oldest first.  With --json, each has its attempts."""
    with opened_webhooks(url) as found:
        page = found.deliveries.list(
            endpoint=endpoint, tenant=tenant, state=state, type=type_, limit=limit, after=after
        )
        data = [struct_fields(each) for each in page]
        if output.json:
            for each in data:
                each["attempts"] = [struct_fields(attempt) for attempt in found.deliveries.attempts(each["id"])]
    heads = ("id", "webhook-id", "type", "endpoint", "state", "attempts", "next", "status", "error")
    rows = [
        (each["id"], each["message_id"], each["type"], each["endpoint"], each["state"], each["attempts"], each["next_at"],
         each["status"], each["error"])
        for each in data
    ]  # fmt: skip
    output.show(data, lambda: print_table(heads, rows))


@webhooks.command(short_help="send deliveries once more")
@click.argument("ids", nargs=-1, required=True, metavar="DELIVERY...")
@on_ledger
def resend(output: Output, url: str | None, ids: tuple[str, ...]) -> None:
    """Send deliveries once more, under the same webhook-ids; a sender does it at once."""
    with opened_webhooks(url) as found:
        for id in ids:
            found.resend(id)
    output.show({"resent": list(ids)}, f"{len(ids):,} will be sent once more.")


@webhooks.command(short_help="send again what an endpoint has not got")
@click.argument("endpoint")
@click.option(
    "--since",
    callback=read_duration,
    default="24h",
    show_default=True,
    metavar="AGE",
    help="How far to go back: 24h, 7d.",
)
@click.option(
    "--only",
    type=click.Choice(["failed", "missing", "all"]),
    default="failed",
    show_default=True,
    help="Dead letters; or events that it did not get, because it was disabled or not there; or everything.",
)
@on_ledger
def recover(output: Output, url: str | None, endpoint: str, since: float, only: Only) -> None:
    """Send again what an endpoint has not got.  If it is interrupted, run it again, and it goes on."""
    with opened_webhooks(url) as found:
        start = datetime.now(UTC).timestamp() - since
        with output.progress(total=sum(found.stats().values())) as progress:
            count = found.recover(endpoint, start, only=only, progress=progress)
    output.show({"recovered": count}, f"{count:,} will be sent.")


@contextmanager
def opened_webhooks(url: str | None) -> Iterator[Webhooks]:
    with open_ledger(url) as guard:
        yield Webhooks(guard, seal=seal_from_environment())


# Receiving, while you develop

SECRETS = "ONCEMORE_WEBHOOK_SECRETS"


@webhooks.command(short_help="receive, verify and print webhooks on this machine")
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
    """Serves each connection on a thread of its own, so that an idle connection does not block the others."""

    daemon_threads = True
    timeout = 0.2  # seconds after which `handle_request` returns, so that the command can end


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
    """The body of an answer.  The server closes it after it was sent, and the command must not end before that."""

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
