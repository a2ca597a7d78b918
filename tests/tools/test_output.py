"""Tables of the command line, written to a pipe."""

from __future__ import annotations

import time

import pytest

from oncemore.tools.commands.output import print_table


def test_piped_table_of_ten_thousand_rows_is_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """`keys list` shows at most ten thousand records."""
    row = ["inv:1", "once:invoices", "settled", 1, "2026-11-16 16:03:00", "2026-11-16 17:03:00", "value", None]
    began = time.process_time()
    print_table(["column"] * len(row), [row] * 10_000)
    assert time.process_time() - began < 4
    assert len(capsys.readouterr().out.splitlines()) == 10_001


def test_wide_and_control_characters_keep_columns_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["key", "n", ""], [["日本", 1, "x"], ["\x1b[0m", 22, None], ["short"]])
    assert capsys.readouterr().out.splitlines() == [
        "key      n",
        "日本     1   x",
        "\\x1b[0m  22",
        "short",
    ]


def test_numbers_are_aligned_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["store", "bytes"], [["sqlite", "1"], ["redis", "1,000"]], numbers=True)
    assert capsys.readouterr().out.splitlines() == ["store   bytes", "sqlite      1", "redis   1,000"]
