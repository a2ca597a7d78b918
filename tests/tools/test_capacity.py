"""`oncemore capacity`: its arithmetic, and that its constants still match the stores."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench.storage as bench
from oncemore.tools.cli import main
from oncemore.tools.commands.capacity import NAMES, SIZES, STORES, bytes_text, interpolate, requirements
from tests.tools.command import oncemore

LOAD: dict[str, Any] = {"rate": 100, "ttl": 86400, "outcome": 1024, "names": NAMES, "processes": 4, "sync": 0.002}


def test_storage_is_rate_times_retention_times_bytes() -> None:
    for name, store in STORES.items():
        found = requirements(store, **LOAD)
        assert found["records"] == 8_640_000, name
        assert found["record_bytes"] == store.kept[SIZES.index(1024)], name
        assert found["kept_bytes"] == found["records"] * found["record_bytes"], name
        assert found["connections"] == 4 * store.connections, name


def test_syncs_are_two_per_operation_up_to_the_disks_limit() -> None:
    def syncs(rate: float) -> dict[str, int]:
        load = {**LOAD, "rate": rate, "sync": 0.01}
        return {name: requirements(store, **load)["syncs_per_second"] for name, store in STORES.items()}

    assert list(syncs(1).values()) == [2, 2, 2]
    assert syncs(100_000) == {
        "sqlite": 100,  # one writer for all processes
        "postgresql": 800,  # two per process
        "redis": 100,  # one thread
    }


@given(size=st.integers(0, 10**7), names=st.integers(0, 600))
def test_larger_outcome_or_names_never_need_less(size: int, names: int) -> None:
    for store in STORES.values():
        for curve in (store.kept, store.written):
            assert interpolate(curve, size + 1) >= interpolate(curve, size) >= curve[0]
        smaller, larger = (
            requirements(store, **{**LOAD, "outcome": size, "names": each})["kept_bytes"] for each in (names, names + 9)
        )
        assert larger > smaller > 0


def test_measured_size_returns_the_measured_figure() -> None:
    for store in STORES.values():
        assert tuple(interpolate(store.kept, size) for size in SIZES) == store.kept


def test_bytes_text_chooses_the_unit() -> None:
    counts = [0, 0.4, 999, 1000, 19.1e9, 3e15, 5e19]
    texts = ["0 B", "0.4 B", "999 B", "1 kB", "19.1 GB", "3 PB", "5e+04 PB"]
    assert [bytes_text(count) for count in counts] == texts


def test_table_and_json_show_the_same_figures() -> None:
    data = oncemore("capacity", "--rate", 100, "--ttl", "24h", "--json").json
    assert data["stores"]["sqlite"]["kept_bytes"] == requirements(STORES["sqlite"], **LOAD)["kept_bytes"]
    shown = oncemore("capacity", "--rate", 100, "--ttl", "24h").out
    assert "8,640,000" in shown
    assert "bench.storage" in shown


def test_on_limits_output_to_one_store() -> None:
    assert list(oncemore("capacity", "--on", "redis", "--json").json["stores"]) == ["redis"]


def test_invalid_options_exit_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (
        ("--rate", "0"),
        ("--ttl", "soon"),
        ("--ttl", "0s"),
        ("--outcome", "much"),
        ("--on", "paper"),
    ):
        assert main(["capacity", option, value]) == 2, (option, value)
        assert capsys.readouterr().err, (option, value)


# The constants


SERVED = [pytest.param(name, marks=pytest.mark.server) for name in ("postgresql", "redis")]


@pytest.fixture(params=["sqlite", *SERVED])
def gauge(request: pytest.FixtureRequest) -> Iterator[tuple[str, bench.Gauge]]:
    kinds: dict[str, Any] = {
        "sqlite": bench.on_sqlite,
        "postgresql": lambda: bench.on_postgres(SimpleNamespace(url=request.getfixturevalue("postgres_url"))),  # type: ignore[arg-type]
        "redis": lambda: bench.on_valkey(request.getfixturevalue("own_valkey")),
    }
    with kinds[request.param]() as found:
        yield request.param, found


def test_constants_match_a_measured_record(gauge: tuple[str, bench.Gauge], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a store's tables have changed so much that the constants are wrong: run bench/storage.py again."""
    monkeypatch.setattr(bench, "RECORDS", 2000)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    name, ledger = gauge
    kept, _ = bench.measure(ledger, bench.Case(NAMES, 1024))
    assert kept == pytest.approx(STORES[name].kept[SIZES.index(1024)], rel=0.25)
