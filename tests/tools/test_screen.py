"""Tables, where a program reads them."""

from __future__ import annotations

import time

import pytest

from oncemore.tools.commands.screen import console, draw_table


def test_ten_thousand_rows_take_no_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """As many as `keys list` shows at most."""
    row = ["inv:1", "once:invoices", "settled", 1, "2026-11-16 16:03:00", "2026-11-16 17:03:00", "value", None]
    began = time.process_time()
    draw_table(console(), ["column"] * len(row), [row] * 10_000)
    assert time.process_time() - began < 4
    assert len(capsys.readouterr().out.splitlines()) == 10_001


def test_columns_stand_below_each_other_whatever_their_letters(capsys: pytest.CaptureFixture[str]) -> None:
    draw_table(console(), ["key", "n", ""], [["日本", 1, "x"], ["\x1b[0m", 22, None], ["short"]])
    assert capsys.readouterr().out.splitlines() == [
        "key      n",
        "日本     1   x",
        "\\x1b[0m  22",
        "short",
    ]


def test_numbers_are_set_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    draw_table(console(), ["store", "bytes"], [["sqlite", "1"], ["redis", "1,000"]], numbers=True)
    assert capsys.readouterr().out.splitlines() == ["store   bytes", "sqlite      1", "redis   1,000"]
