"""Who calls a Lambda function: the identity that API Gateway has checked, else the credentials that were sent."""

from __future__ import annotations

from typing import Any

from ..principal import anonymous, credentials_of
from .events import Event, RestApi

# Where the gateway puts who the caller is, by the kind of authorizer.  A signed request (IAM) must be known by these: its
# Authorization header is another one on every attempt.  Headers that a load balancer would set prove nothing: without its
# own authentication, callers set them.
PLACES = (
    ("authorizer", "jwt", "claims", "sub"),
    ("authorizer", "claims", "sub"),
    ("authorizer", "iam", "cognitoIdentity", "identityId"),
    ("authorizer", "iam", "userArn"),
    ("authorizer", "principalId"),
    ("authorizer", "lambda", "principalId"),
    ("identity", "cognitoIdentityId"),
    ("identity", "userArn"),
)


def caller_of(event: Event) -> str:
    """The caller's name, with where it was found, so that one kind of caller is never taken for another."""
    for place in PLACES:
        found: Any = event.get("requestContext")
        for name in place:
            found = found.get(name) if isinstance(found, dict) else None
        if found not in (None, ""):
            return f"{'.'.join(place)}={found}"
    return credentials_of(RestApi().headers(event)) or anonymous()
