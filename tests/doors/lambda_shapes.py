"""Events as AWS sends them, with every documented field; a test sets the fields that it needs."""

from __future__ import annotations

import base64
import uuid
from typing import Any
from urllib.parse import parse_qs, quote

Event = dict[str, Any]

ARN = "arn:aws:sqs:eu-central-1:123456789012:orders"


def body_of(body: str | bytes | None) -> Event:
    if isinstance(body, bytes):
        return {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}
    return {"body": body, "isBase64Encoded": False}


def rest_api(
    method: str = "POST",
    path: str = "/refunds",
    body: str | bytes | None = "{}",
    query: str = "",
    authorizer: Event | None = None,
    resource: str = "/{proxy+}",
    identity: Event | None = None,
    **headers: str | list[str],
) -> Event:
    """API Gateway, REST API."""
    many = {name: [each] if isinstance(each, str) else each for name, each in named(headers).items()}
    queries = parse_qs(query)
    return {
        "resource": resource,
        "path": path,
        "httpMethod": method,
        "headers": {name: values[-1] for name, values in many.items()},
        "multiValueHeaders": many,
        "queryStringParameters": {name: values[-1] for name, values in queries.items()} or None,
        "multiValueQueryStringParameters": queries or None,
        "pathParameters": {"proxy": path.rpartition("/v9/")[2].lstrip("/")},
        "stageVariables": None,
        "requestContext": {
            "accountId": "123456789012",
            "apiId": "abcdef",
            "authorizer": authorizer,
            "domainName": "abcdef.execute-api.eu-central-1.amazonaws.com",
            "domainPrefix": "abcdef",
            "extendedRequestId": "x",
            "httpMethod": method,
            "identity": {
                "accessKey": None,
                "accountId": None,
                "apiKey": None,
                "caller": None,
                "cognitoAuthenticationProvider": None,
                "cognitoIdentityId": None,
                "sourceIp": "192.0.2.1",
                "user": None,
                "userAgent": "test",
                "userArn": None,
                **(identity or {}),
            },
            "path": f"/prod{path}",
            "protocol": "HTTP/1.1",
            "requestId": str(uuid.uuid4()),
            "requestTime": "15/Nov/2026:22:07:00 +0000",
            "requestTimeEpoch": 1794780420000,
            "resourceId": "r",
            "resourcePath": resource,
            "stage": "prod",
        },
        **body_of(body),
    }


def http_api(
    method: str = "POST",
    path: str = "/refunds",
    body: str | bytes | None = "{}",
    query: str = "",
    authorizer: Event | None = None,
    stage: str = "$default",
    **headers: str | list[str],
) -> Event:
    """API Gateway, HTTP API with payload format 2.0; a function URL is the same."""
    single = {name.lower(): each if isinstance(each, str) else ",".join(each) for name, each in named(headers).items()}
    raw = path if stage == "$default" else f"/{stage}{path}"
    event: Event = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": raw,
        "rawQueryString": query,
        "cookies": ["session=1"],
        "headers": single,
        "requestContext": {
            "accountId": "123456789012",
            "apiId": "abcdef",
            "domainName": "abcdef.execute-api.eu-central-1.amazonaws.com",
            "domainPrefix": "abcdef",
            "http": {
                "method": method,
                "path": raw,
                "protocol": "HTTP/1.1",
                "sourceIp": "192.0.2.1",
                "userAgent": "test",
            },
            "requestId": "r",
            "routeKey": "$default",
            "stage": stage,
            "time": "15/Nov/2026:22:07:00 +0000",
            "timeEpoch": 1794780420000,
            **({"authorizer": authorizer} if authorizer else {}),
        },
        **body_of(body),
    }
    if body is None:
        del event["body"]
    return event


def load_balancer(
    method: str = "POST",
    path: str = "/refunds",
    body: str | bytes | None = "{}",
    query: str = "",
    multi: bool = False,
    **headers: str | list[str],
) -> Event:
    """An Application Load Balancer; *multi* is the target group's attribute for multi-value headers."""
    many = {name.lower(): [each] if isinstance(each, str) else each for name, each in named(headers).items()}
    queries = {quote(name): [quote(each) for each in values] for name, values in parse_qs(query).items()}
    event = {
        "requestContext": {
            "elb": {"targetGroupArn": "arn:aws:elasticloadbalancing:eu-central-1:123456789012:targetgroup/f/1"}
        },
        "httpMethod": method,
        "path": quote(path),
        **body_of(body if body is not None else ""),
    }
    if multi:
        return {**event, "multiValueQueryStringParameters": queries, "multiValueHeaders": many}
    return {
        **event,
        "queryStringParameters": {name: values[-1] for name, values in queries.items()},
        "headers": {name: values[-1] for name, values in many.items()},
    }


def load_balancer_multi(*args: Any, **options: Any) -> Event:
    return load_balancer(*args, **{**options, "multi": True})


def named(headers: dict[str, Any]) -> dict[str, Any]:
    """Return the headers of every request, and *given* ones: `idempotency_key="k"` becomes `Idempotency-Key: k`."""
    given = {name.replace("_", "-").title(): value for name, value in headers.items()}
    return {"Content-Type": "application/json", "Authorization": "Bearer alice", **given}


def message(body: str = "{}", id: str = "", group: str = "", queue: str = ARN, **attributes: str) -> Event:
    """One message of an SQS batch; with a *group*, of a FIFO queue."""
    fifo = {"MessageGroupId": group, "MessageDeduplicationId": f"d-{id}", "SequenceNumber": "1"} if group else {}
    return {
        "messageId": id or str(uuid.uuid4()),
        "receiptHandle": "AQEB",
        "body": body,
        "attributes": {
            "ApproximateReceiveCount": "1",
            "SentTimestamp": "1794780420000",
            "SenderId": "AIDA",
            "ApproximateFirstReceiveTimestamp": "1794780420001",
            **fifo,
        },
        "messageAttributes": {
            name: {"stringValue": value, "stringListValues": [], "binaryListValues": [], "dataType": "String"}
            for name, value in attributes.items()
        },
        "md5OfBody": "0",
        "eventSource": "aws:sqs",
        "eventSourceARN": f"{queue}.fifo" if group else queue,
        "awsRegion": "eu-central-1",
    }


def batch(*messages: Event) -> Event:
    return {"Records": list(messages)}


class Context:
    """The context of an invocation; *left* is in seconds, and may be changed meanwhile."""

    function_name = "orders"

    def __init__(self, left: float = 30.0) -> None:
        self.left = left

    def get_remaining_time_in_millis(self) -> int:
        return int(self.left * 1000)
