"""Microseconds to fingerprint a JSON body, compared with orjson and with the standard library.

    python -m bench.fingerprint

The other two are lossy: they round numbers to doubles and accept repeated members.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from timeit import Timer

import orjson

from oncemore._fingerprint.fingerprint import Fingerprinter

ROUNDS = 60
SECRET = b"only for this benchmark, no secret"


def order(lines: int) -> bytes:
    """Return an order with *lines* lines as a Python client sends it, with spaces and decimal prices."""
    address = {"line1": "1 Main Street", "city": "Springfield", "postcode": "12345", "country": "US"}
    customer = {"id": "cus_9f8e7d6c", "email": "jane.doe@example.com", "name": "Jane Doe", "address": address}
    body = {"order_id": "ord_9f8e7d6c5b4a", "amount": 1999.50, "currency": "EUR", "capture": True, "note": None}
    thing = {"description": "A rather ordinary thing", "discount": None}
    items = [{"sku": f"SKU-{n:05d}", "quantity": n + 1, "unit_price": 19.99 + n, **thing} for n in range(lines)]
    return json.dumps(
        {**body, "customer": customer, "items": items} if lines else {**body, "address": address}
    ).encode()


def with_orjson(body: bytes) -> bytes:
    return orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)


def with_orjson_and_digest(body: bytes) -> str:
    return hashlib.sha256(with_orjson(body)).hexdigest()


def with_standard_library(body: bytes) -> str:
    return hashlib.sha256(json.dumps(json.loads(body), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fingerprint_with(**settings: object) -> Callable[[bytes], str]:
    make = Fingerprinter(**settings).fingerprint  # type: ignore[arg-type]
    return lambda body: make("POST", "/orders", "", "application/json", body)


CONTENDERS: dict[str, Callable[[bytes], object]] = {
    "fingerprint": fingerprint_with(),
    "fingerprint, exclude": fingerprint_with(exclude=["note", "/customer/email"]),
    "fingerprint, secret": fingerprint_with(secrets=[SECRET]),
    "fingerprint, raw": fingerprint_with(mode="raw"),
    "orjson, sorted": with_orjson,
    "orjson, sorted, SHA-256": with_orjson_and_digest,
    "json, sorted, SHA-256": with_standard_library,
}


def microseconds(work: Callable[[bytes], object], body: bytes) -> float:
    """Return the best of many short rounds, which other work on the machine has disturbed least."""
    timer = Timer(lambda: work(body))
    number = max(timer.autorange()[0] // 40, 1)
    return min(timer.repeat(ROUNDS, number)) / number * 1e6


def main() -> None:
    bodies = [order(0), order(6), order(78)]
    print(f"{'µs per body of':<26}" + "".join(f"{len(body):>8} B" for body in bodies))
    for name, work in CONTENDERS.items():
        print(f"{name:<26}" + "".join(f"{microseconds(work, body):>10.1f}" for body in bodies), flush=True)


if __name__ == "__main__":
    main()
