"""Calls to the provider.  Each step has one key, the same for every attempt, so the provider moves the money once."""

from __future__ import annotations

from typing import Any

import httpx

from oncemore import Retry
from oncemore.client.httpx import AsyncRetryTransport

from .observability import correlation
from .problems import Declined, ProviderTimeout, ProviderUnavailable


class ProviderClient:
    """A client of the provider at *url*; a call takes at most *timeout* seconds, including its retries."""

    def __init__(self, url: str, timeout: float) -> None:
        retry = Retry(attempts=2, deadline=timeout, budget=None)
        self._client = httpx.AsyncClient(
            base_url=url, transport=AsyncRetryTransport(retry), timeout=timeout, trust_env=False
        )

    async def charge(self, key: str, *, amount: int, currency: str, reference: str) -> str:
        """Take the customer's money, and return the id of the charge."""
        return await self._move("/charges", key, amount=amount, currency=currency, reference=reference)

    async def pay_out(self, key: str, *, amount: int, currency: str, reference: str) -> str:
        """Pay the customer's money out, and return the id of the payout."""
        return await self._move("/payouts", key, amount=amount, currency=currency, reference=reference)

    async def _move(self, path: str, key: str, **body: Any) -> str:
        headers = {"Idempotency-Key": key, **correlation()}
        try:
            answer = await self._client.post(path, json=body, headers=headers)
        except httpx.TimeoutException as error:
            raise ProviderTimeout("The provider may have moved the money: retry with the same key") from error
        except httpx.TransportError as error:
            raise ProviderUnavailable("Retry with the same key") from error
        movement = answer.json()
        if answer.status_code == 409 and movement.get("error") == "duplicate":  # done before: use the first result
            movement = movement["existing"]
        elif answer.status_code == 402:
            raise Declined(f"The provider says: {movement.get('error')}")
        elif answer.status_code != 201:
            raise ProviderUnavailable(f"The provider answered {answer.status_code}: retry with the same key")
        id: str = movement["id"]
        return id

    async def close(self) -> None:
        await self._client.aclose()
