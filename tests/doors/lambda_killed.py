"""A Lambda function that is killed in the middle of its work: `python -m tests.doors.lambda_killed STORE LEFT`."""

from __future__ import annotations

import os
import sys
from typing import Any

from oncemore import Guard
from oncemore.web.aws_lambda import IdempotencyMiddleware

from .lambda_shapes import Context, http_api


def handler(event: Any, context: Any) -> None:
    os._exit(9)


if __name__ == "__main__":
    IdempotencyMiddleware(handler, guard=Guard(sys.argv[1]))(http_api(idempotency_key="k"), Context(float(sys.argv[2])))
