"""What Flask's views raise, which Flask makes error pages of: the WSGI door must know a database's refusal from a fault."""

from __future__ import annotations

import sys
from typing import Any

NOTED = "oncemore.error"  # in the request's environ


def note_errors() -> None:
    """Have Flask tell of its views' errors; where it has been imported, or there is no app of its."""
    flask: Any = sys.modules.get("flask")
    if flask is not None:
        flask.got_request_exception.connect(noted)


def noted(sender: Any, exception: BaseException | None = None, **_: Any) -> None:
    sys.modules["flask"].request.environ[NOTED] = exception
