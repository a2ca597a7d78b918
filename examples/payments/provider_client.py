"""Calls to the provider: each under a key that stays the same however often we ask, so that it moves the money once."""

from __future__ import annotations

from typing import Any

import httpx

from oncemore import Retry
from oncemore.client.httpx import AsyncRetryTransport

from .observed import correlation
from .problems import Declined, ProviderTimeout, ProviderUnavailable


class ProviderClient:
    """The provider at *url*; a call takes *timeout* seconds at most, with all its attempts."""

    def __init__(self, url: str, timeout: float) -> None:
        retry = Retry(attempts=2, deadline=timeout, budget=None)
        self._client = httpx.AsyncClient(
            base_url=url, transport=AsyncRetryTransport(retry), timeout=timeout, trust_env=False
        )

    async def charge(self, key: str, *, amount: int, currency: str, reference: str) -> str:
        """Take the customer's money; the charge's id."""
        return await self._move("/charges", key, amount=amount, currency=currency, reference=reference)

    async def pay_out(self, key: str, *, amount: int, currency: str, reference: str) -> str:
        """Give the customer's money back; the payout's id."""
        return await self._move("/payouts", key, amount=amount, currency=currency, reference=reference)

    async def _move(self, path: str, key: str, **body: Any) -> str:
        headers = {"Idempotency-Key": key, **correlation()}
        try:
            answer = await self._client.post(path, json=body, headers=headers)
        except httpx.TimeoutException as error:
            raise ProviderTimeout("It may have moved the money: ask once more, with the same key") from error
        except httpx.TransportError as error:
            raise ProviderUnavailable("Ask once more, with the same key") from error
        told = answer.json()
        if answer.status_code == 409 and told.get("error") == "duplicate":  # done before: its first result is ours
            told = told["existing"]
        elif answer.status_code == 402:
            raise Declined(f"The provider says: {told.get('error')}")
        elif answer.status_code != 201:
            raise ProviderUnavailable(f"The provider answered {answer.status_code}: ask once more, with the same key")
        id: str = told["id"]
        return id

    async def close(self) -> None:
        await self._client.aclose()
