"""The pages name what there is."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from oncemore._runtime.backoff import Jitter
from oncemore.client.engine import Engine
from oncemore.client.retry import Retry
from oncemore.client.story import REASONS

HOWTO = (Path(__file__).parents[2] / "docs" / "howto" / "retry-client.md").read_text()

PRESETS = [
    name
    for name, member in inspect.getmembers(Retry, inspect.ismethod)
    if member.__self__ is Retry and not name.startswith("_")
]
SETTINGS = [field.name for field in fields(Retry) if field.init]
OPTIONS = [name for name in inspect.signature(Engine).parameters if name not in ("retry", "keyring")]


def test_every_setting_is_on_the_page() -> None:
    assert [name for name in (*SETTINGS, *OPTIONS, *get_args(Jitter)) if f"`{name}`" not in HOWTO] == []


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_on_the_page_with_its_figures(preset: str) -> None:
    retry = getattr(Retry, preset)()
    [line] = [line for line in HOWTO.splitlines() if line.startswith(f"| `Retry.{preset}()`")]
    _, _, attempts, deadline, *_ = line.split("|")
    units = {"s": 1, "min": 60, "h": 3600}
    number, unit = deadline.split()
    assert (int(attempts), float(number) * units[unit]) == (retry.attempts, retry.deadline)


def test_every_reason_has_a_sentence() -> None:
    assert all(REASONS.values())
    assert len(PRESETS) == 6
