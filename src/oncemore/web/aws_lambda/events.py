"""HTTP as Lambda functions see it: events become requests, responses become what API Gateway or a load balancer expects."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode

from ...errors import InvalidPayload
from ..headers import NOT_OF_A_GET, Headers
from ..problem import Response

Event = dict[str, Any]

PARAMETER = re.compile(r"\{(\w+)\+?\}")


class Reply(NamedTuple):
    """What the function has answered, as HTTP; *value* is its own form of it, which may not be *readable* at all."""

    status: int
    headers: Headers
    body: bytes
    value: Any
    readable: bool = True


# What the gateway makes of an answer that it cannot read.
MALFORMED = 502


class RestApi:
    """API Gateway's REST APIs, and its HTTP APIs with payload format 1.0."""

    @staticmethod
    def is_source(event: Event) -> bool:
        return "httpMethod" in event and "requestContext" in event

    def method(self, event: Event) -> str:
        return str(event["httpMethod"]).upper()

    def path(self, event: Event) -> str:
        return str(event.get("path") or "/")

    def inner_path(self, event: Event) -> str:
        """The path as the API's own resource names it, without what a custom domain has put before it."""
        given = event.get("pathParameters") or {}
        return PARAMETER.sub(lambda found: given.get(found[1], found[0]), event.get("resource") or self.path(event))

    def query(self, event: Event) -> str:
        """In the order of names: their own is lost on the way here, and a retry's must be the same."""
        return urlencode([(name, value) for name, values in many(event, "QueryStringParameters") for value in values])

    def headers(self, event: Event) -> list[tuple[str, str]]:
        return [(name.lower(), str(value)) for name, values in many(event, "Headers") for value in values]

    def as_get(self, event: Event) -> Event:
        """The event by which the resource itself is asked for."""
        return {**event, **asked(event), "httpMethod": "GET", "body": None, "isBase64Encoded": False}

    def reply(self, value: Any) -> Reply:
        """The function's answer, read as the gateway reads it."""
        return structured(value)

    def added(self, event: Event, reply: Reply, headers: Headers) -> Any:
        """The function's own answer, with our headers."""
        if not reply.readable:
            return reply.value
        return {**reply.value, "headers": {**(reply.value.get("headers") or {}), **dict(headers)}}

    def rendered(self, event: Event, response: Response) -> Event:
        return {"statusCode": response.status, "multiValueHeaders": by_name(response.headers), **body_of(response.body)}


class LoadBalancer(RestApi):
    """An Application Load Balancer, with or without multi-value headers."""

    @staticmethod
    def is_source(event: Event) -> bool:
        return "elb" in (event.get("requestContext") or {})

    def path(self, event: Event) -> str:
        return unquote(super().path(event))

    def inner_path(self, event: Event) -> str:
        return self.path(event)

    def query(self, event: Event) -> str:
        """As `RestApi`, but they come as they were sent, percent-encoded."""
        return "&".join(f"{name}={value}" for name, values in many(event, "QueryStringParameters") for value in values)

    def added(self, event: Event, reply: Reply, headers: Headers) -> Any:
        if "multiValueHeaders" not in event or not reply.readable:
            return super().added(event, reply, headers)
        return {
            **reply.value,
            "multiValueHeaders": {**(reply.value.get("multiValueHeaders") or {}), **by_name(headers)},
        }

    def rendered(self, event: Event, response: Response) -> Event:
        found = {"statusDescription": described(response.status), **super().rendered(event, response)}
        if "multiValueHeaders" not in event:
            found["headers"] = joined(found.pop("multiValueHeaders"))
        return found


class HttpApi(RestApi):
    """API Gateway's HTTP APIs with payload format 2.0, and function URLs."""

    @staticmethod
    def is_source(event: Event) -> bool:
        return event.get("version") == "2.0" and "http" in (event.get("requestContext") or {})

    def method(self, event: Event) -> str:
        return str(event["requestContext"]["http"]["method"]).upper()

    def path(self, event: Event) -> str:
        return str(event.get("rawPath") or "/")

    def inner_path(self, event: Event) -> str:
        """The path without its stage, which it begins with unless the stage is the default one."""
        stage, path = f"/{event['requestContext'].get('stage', '$default')}", self.path(event)
        return path.removeprefix(stage) or "/" if path == stage or path.startswith(f"{stage}/") else path

    def query(self, event: Event) -> str:
        return str(event.get("rawQueryString") or "")

    def as_get(self, event: Event) -> Event:
        context = event["requestContext"]
        get = {**context, "http": {**context["http"], "method": "GET"}}
        return {**event, **asked(event), "requestContext": get, "body": None, "isBase64Encoded": False}

    def reply(self, value: Any) -> Reply:
        """What has no statusCode is itself the body: a text, or anything that JSON can say."""
        if isinstance(value, dict) and "statusCode" in value:
            return structured(value)
        try:
            text = value if isinstance(value, str) else json.dumps(value)
        except (TypeError, ValueError):
            return Reply(MALFORMED, (), b"", value, readable=False)
        headers = {"content-type": "application/json"}
        return structured({"statusCode": 200, "headers": headers, "body": text})

    def rendered(self, event: Event, response: Response) -> Event:
        return {"statusCode": response.status, "headers": joined(by_name(response.headers)), **body_of(response.body)}


SOURCES: tuple[type[RestApi], ...] = (HttpApi, LoadBalancer, RestApi)


def source_of(event: Any) -> RestApi | None:
    """How to read the event; None where it is no HTTP request."""
    if not isinstance(event, dict):
        return None
    return next((source() for source in SOURCES if source.is_source(event)), None)


def asked(event: Event) -> Event:
    """The headers of the event, in whatever form it has them, but for those that are not of a GET."""
    forms = [form for form in ("headers", "multiValueHeaders") if event.get(form)]
    return {
        form: {name: value for name, value in event[form].items() if name.lower() not in NOT_OF_A_GET} for form in forms
    }


def request_body(event: Event) -> bytes:
    body = event.get("body") or ""
    if not event.get("isBase64Encoded"):
        return str(body).encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:
        raise InvalidPayload("The body is said to be base64, and is not") from error


def many(event: Mapping[str, Any], name: str) -> list[tuple[str, list[str]]]:
    """Headers or query parameters, each with all its values, in the order of their names."""
    found = event.get(f"multiValue{name}") or {}
    single = {} if found else event.get(name[0].lower() + name[1:]) or {}
    values = {**{each: list(given) for each, given in found.items()}, **{each: [one] for each, one in single.items()}}
    return sorted(values.items())


def structured(value: Any) -> Reply:
    """An answer with a statusCode; as the gateway's 502, where it is none."""
    try:
        status, body = int(value["statusCode"]), value.get("body") or ""
        data = base64.b64decode(body, validate=True) if value.get("isBase64Encoded") else body.encode()
        cookies = [("set-cookie", cookie) for cookie in value.get("cookies") or ()]
        headers = [(name.lower(), str(one)) for name, values in many(value, "Headers") for one in values]
        # Where a header stands in both forms, the gateway takes the one with many values, and all of the other names.
        single = {name.lower(): str(one) for name, one in (value.get("headers") or {}).items()}
        extra = [(name, one) for name, one in single.items() if name not in dict(headers)]
    except (TypeError, KeyError, ValueError, AttributeError):
        return Reply(MALFORMED, (), b"", value, readable=False)
    return Reply(status, [*headers, *extra, *cookies], data, value)


def by_name(headers: Headers) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name, []).append(value)
    return found


def joined(headers: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: ", ".join(values) for name, values in headers.items()}


def body_of(body: bytes) -> dict[str, Any]:
    """The body as text where it is one, else as base64: either way the client gets the same bytes."""
    try:
        return {"body": body.decode(), "isBase64Encoded": False}
    except UnicodeDecodeError:
        return {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}


def described(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"
