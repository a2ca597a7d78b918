"""Runs the service on 127.0.0.1: `python -m examples.payments`.  The provider: `python -m examples.payments.provider`."""

from __future__ import annotations

import argparse

import uvicorn

from .app import create
from .observability import log_to_stderr

if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m examples.payments", description="The payments service.")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8000)
    given = options.parse_args()
    log_to_stderr()
    uvicorn.run(create(), host=given.host, port=given.port, log_config=None, access_log=False)
