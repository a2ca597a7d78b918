"""Reads HTTP requests from Lambda events of API Gateway and load balancers, their callers, and the time that is left."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote, urlencode

from ..._contract.policy import Policy
from ...errors import InvalidPayload
from ..problem import Response, status_line
from ..request import NOT_OF_A_GET, Headers, anonymous, credentials_of

Event = dict[str, Any]

PARAMETER = re.compile(r"\{(\w+)\+?\}")


class Reply(NamedTuple):
    """A function's answer as HTTP.  *value* is the answer itself, and *readable* is False if the gateway cannot read it."""

    status: int
    headers: Headers
    body: bytes
    value: Any
    readable: bool = True


MALFORMED = 502  # the status that the gateway sends for an answer that it cannot read

# The places of the caller's identity in the request context, by the kind of authorizer.  The Authorization header of a signed
# request (IAM) differs on every attempt, so it cannot name the caller.  A load balancer's identity headers are not used: if its
# authentication is off, callers can set them.
IDENTITIES = (
    ("authorizer", "jwt", "claims", "sub"),
    ("authorizer", "claims", "sub"),
    ("authorizer", "iam", "cognitoIdentity", "identityId"),
    ("authorizer", "iam", "userArn"),
    ("authorizer", "principalId"),
    ("authorizer", "lambda", "principalId"),
    ("identity", "cognitoIdentityId"),
    ("identity", "userArn"),
)

# Lambda may end a function a little later than announced, and its lease must not lapse while it works.
GRACE = 1.0


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
        """Return the path as the API's own resource writes it, without the base path of a custom domain."""
        given = event.get("pathParameters") or {}
        return PARAMETER.sub(lambda found: given.get(found[1], found[0]), event.get("resource") or self.path(event))

    def query(self, event: Event) -> str:
        """Return the query, sorted by name: the event does not have its order, and a retry's query must be equal."""
        return urlencode(
            [(name, value) for name, values in values_by_name(event, "QueryStringParameters") for value in values]
        )

    def headers(self, event: Event) -> list[tuple[str, str]]:
        return [(name.lower(), str(value)) for name, values in values_by_name(event, "Headers") for value in values]

    def as_get(self, event: Event) -> Event:
        """Return the event of a GET of the same URL."""
        return {**event, **headers_of_get(event), "httpMethod": "GET", "body": None, "isBase64Encoded": False}

    def reply(self, value: Any) -> Reply:
        """Return the function's answer, read as the gateway reads it."""
        return structured(value)

    def added(self, event: Event, reply: Reply, headers: Headers) -> Any:
        """Return the function's own answer with *headers* added."""
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
        """Return the query, sorted by name; a load balancer leaves it percent-encoded."""
        return "&".join(
            f"{name}={value}" for name, values in values_by_name(event, "QueryStringParameters") for value in values
        )

    def added(self, event: Event, reply: Reply, headers: Headers) -> Any:
        if "multiValueHeaders" not in event or not reply.readable:
            return super().added(event, reply, headers)
        return {
            **reply.value,
            "multiValueHeaders": {**(reply.value.get("multiValueHeaders") or {}), **by_name(headers)},
        }

    def rendered(self, event: Event, response: Response) -> Event:
        found = {"statusDescription": status_line(response.status), **super().rendered(event, response)}
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
        """Return the path without its stage; it begins with its stage unless that is `$default`."""
        stage, path = f"/{event['requestContext'].get('stage', '$default')}", self.path(event)
        return path.removeprefix(stage) or "/" if path == stage or path.startswith(f"{stage}/") else path

    def query(self, event: Event) -> str:
        return str(event.get("rawQueryString") or "")

    def as_get(self, event: Event) -> Event:
        context = event["requestContext"]
        get = {**context, "http": {**context["http"], "method": "GET"}}
        return {**event, **headers_of_get(event), "requestContext": get, "body": None, "isBase64Encoded": False}

    def reply(self, value: Any) -> Reply:
        """Return the function's answer.  A value without a statusCode is the body itself: a text, or any JSON."""
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
    """Return the reader of the event, or None if the event is not an HTTP request."""
    if not isinstance(event, dict):
        return None
    return next((source() for source in SOURCES if source.is_source(event)), None)


def headers_of_get(event: Event) -> Event:
    """Return the event's headers for a GET, in each of their two forms that the event has."""
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
        raise InvalidPayload("isBase64Encoded is true, and the body is not base64; nothing was done") from error


def values_by_name(event: Mapping[str, Any], name: str) -> list[tuple[str, list[str]]]:
    """Return headers or query parameters, each with all its values, sorted by their names."""
    found = event.get(f"multiValue{name}") or {}
    single = {} if found else event.get(name[0].lower() + name[1:]) or {}
    values = {**{each: list(given) for each, given in found.items()}, **{each: [one] for each, one in single.items()}}
    return sorted(values.items())


def structured(value: Any) -> Reply:
    """Read an answer that must have a statusCode; without a valid one, it is not readable."""
    try:
        status, body = int(value["statusCode"]), value.get("body") or ""
        data = base64.b64decode(body, validate=True) if value.get("isBase64Encoded") else body.encode()
        cookies = [("set-cookie", cookie) for cookie in value.get("cookies") or ()]
        headers = [(name.lower(), str(one)) for name, values in values_by_name(value, "Headers") for one in values]
        # If a header is in both forms, the gateway uses the form with many values.
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
    """Return the body as text if it is UTF-8, else as base64, so that the client gets the same bytes."""
    try:
        return {"body": body.decode(), "isBase64Encoded": False}
    except UnicodeDecodeError:
        return {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}


def caller_of(event: Event) -> str:
    """Return the caller that the gateway has authenticated, with the kind of identity; else a digest of the credentials."""
    for place in IDENTITIES:
        found: Any = event.get("requestContext")
        for name in place:
            found = found.get(name) if isinstance(found, dict) else None
        if found not in (None, ""):
            return f"{'.'.join(place)}={found}"
    return credentials_of(RestApi().headers(event)) or anonymous()


# ── The time that is left ──────────────────────────────────────────────────────────────────────────────────────────────


def time_left(context: Any) -> float | None:
    """Return the seconds until Lambda ends the function, or None if the context does not say."""
    tell = getattr(context, "get_remaining_time_in_millis", None)
    return max(0.0, tell() / 1000) if tell is not None else None


def within(policy: Policy, left: float | None) -> Policy:
    """Return the policy with a lease of at most the time *left* plus GRACE, so that a retry waits no longer than needed."""
    if left is None or left + GRACE >= policy.lease:
        return policy
    return dataclasses.replace(policy, lease=left + GRACE)


def longest_wait(left: float | None) -> float | None:
    """Return half of the time, the longest wait for a running attempt: the rest is needed to perform if that fails."""
    return None if left is None else left / 2
