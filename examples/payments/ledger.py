"""Payments, refunds and the double-entry ledger: one function for each change, on a connection that it never commits.

Amounts are integers in the currency's minor unit.  A function that raises has changed nothing, because a refusal is an
outcome, too, and is committed like any other.
"""

from __future__ import annotations

import secrets
from typing import Any

from examples.sql import Row, rows

from .problems import NotFound, OrderPaid, TooMuch, WrongStatus

# The accounts: the provider's debt to us, our earnings, and our debt to customers until their money is paid out.
PROVIDER, REVENUE, PAYABLE = "provider", "revenue", "refunds_payable"


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(6)}"


async def one(connection: Any, table: str, id: str, *, by: str = "id") -> Row:
    """Return the row with that id, or raise NotFound."""
    found = await rows(connection, f"SELECT * FROM {table} WHERE {by} = ?", id)
    if not found:
        raise NotFound(f"There is no {table.removesuffix('s')} {id}")
    return found[0]


async def book(connection: Any, kind: str, reference: str, *, debit: str, credit: str, of: Row) -> None:
    """Add an entry: the amount *of* a payment or refund, from one account to the other."""
    await rows(
        connection,
        "INSERT INTO entries (kind, reference, debit, credit, amount, currency) VALUES (?, ?, ?, ?, ?, ?)",
        *(kind, reference, debit, credit, of["amount"], of["currency"]),
    )


async def open_payment(connection: Any, *, order_id: str, customer_id: str, amount: int, currency: str) -> Row:
    """Create an authorized payment, or raise OrderPaid if the order has one."""
    made = await rows(
        connection,
        "INSERT INTO payments (id, order_id, customer_id, amount, currency) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (order_id) WHERE status <> 'voided' DO NOTHING RETURNING *",
        *(new_id("pay"), order_id, customer_id, amount, currency),
    )
    if not made:
        raise OrderPaid(f"The order {order_id} has a payment; void it first, or pay another order")
    await rows(connection, "INSERT INTO customers (id) VALUES (?) ON CONFLICT (id) DO NOTHING", customer_id)
    return made[0]


async def begin_capture(connection: Any, id: str) -> Row:
    """Reserve the payment, so that no other request can capture or void it, and return it."""
    begun = await rows(
        connection, "UPDATE payments SET status = 'capturing' WHERE id = ? AND status = 'authorized' RETURNING *", id
    )
    if begun:
        return begun[0]
    status = (await one(connection, "payments", id))["status"]
    raise WrongStatus(f"The payment {id} is {status}, and only an authorized one can be captured")


async def cancel_capture(connection: Any, payment: Row) -> None:
    """Undo `begin_capture`, because the provider refused the charge."""
    await rows(connection, "UPDATE payments SET status = 'authorized' WHERE id = ?", payment["id"])


async def captured(connection: Any, id: str, charge_id: str) -> Row:
    """Complete the capture, book the money, and return the payment."""
    done = await rows(
        connection, "UPDATE payments SET status = 'captured', charge_id = ? WHERE id = ? RETURNING *", charge_id, id
    )
    await book(connection, "capture", id, debit=PROVIDER, credit=REVENUE, of=done[0])
    return done[0]


async def begin_refund(connection: Any, charge_id: str, amount: int) -> Row:
    """Create a pending refund, which reserves its amount of the payment."""
    payment = await one(connection, "payments", charge_id, by="charge_id")
    left = await rows(
        connection,
        "UPDATE payments SET refunded = refunded + ? WHERE id = ? AND refunded + ? <= amount RETURNING refunded",
        *(amount, payment["id"], amount),
    )
    if not left:
        raise TooMuch(
            f"{amount} is more than is left of {payment['amount']}: {payment['refunded']} is refunded already"
        )
    made = await rows(
        connection,
        "INSERT INTO refunds (id, payment_id, amount, currency) VALUES (?, ?, ?, ?) RETURNING *",
        *(new_id("rf"), payment["id"], amount, payment["currency"]),
    )
    return made[0]


async def cancel_refund(connection: Any, refund: Row) -> None:
    """Undo `begin_refund`, because the provider refused the payout."""
    await rows(connection, "UPDATE refunds SET status = 'failed' WHERE id = ?", refund["id"])
    await rows(
        connection, "UPDATE payments SET refunded = refunded - ? WHERE id = ?", refund["amount"], refund["payment_id"]
    )


async def refunded(connection: Any, id: str, payout_id: str) -> Row:
    """Complete the refund, book the debt to the customer, and return it."""
    done = await rows(
        connection, "UPDATE refunds SET status = 'succeeded', payout_id = ? WHERE id = ? RETURNING *", payout_id, id
    )
    await book(connection, "refund", id, debit=REVENUE, credit=PAYABLE, of=done[0])
    return done[0]


async def settle_refund(connection: Any, id: str) -> Row:
    """Book that the customer has the money.  The provider may say so before it has answered the payout request."""
    done = await rows(connection, "UPDATE refunds SET settled = settled + 1 WHERE id = ? RETURNING *", id)
    if not done:
        raise NotFound(f"There is no refund {id}")
    await book(connection, "settlement", id, debit=PAYABLE, credit=PROVIDER, of=done[0])
    return done[0]


async def change_customer(connection: Any, id: str, *, name: str, email: str) -> Row:
    """Change the customer, and return it with its new version."""
    changed = await rows(
        connection,
        "UPDATE customers SET name = ?, email = ?, version = version + 1 WHERE id = ? RETURNING *",
        *(name, email, id),
    )
    if not changed:
        raise NotFound(f"There is no customer {id}")
    return changed[0]


async def balances(connection: Any) -> dict[str, int]:
    """Return debits minus credits of each account; if the books are right, the sum is zero."""
    found = await rows(
        connection,
        "SELECT account, sum(amount) AS balance FROM (SELECT debit AS account, amount FROM entries"
        " UNION ALL SELECT credit, -amount FROM entries) AS sides GROUP BY account ORDER BY account",
    )
    return {row["account"]: int(row["balance"]) for row in found}
