"""Runs the service: `python -m examples.matchmaking --port 8000`."""

from __future__ import annotations

import argparse
import logging
import os

import uvicorn

from .app import create

if __name__ == "__main__":
    options = argparse.ArgumentParser(prog="python -m examples.matchmaking", description="The matchmaking service.")
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=int(os.environ.get("PORT") or 8000))
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    uvicorn.run(create(), host=given.host, port=given.port, log_config=None, access_log=False)
