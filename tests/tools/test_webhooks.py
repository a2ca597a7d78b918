"""`oncemore webhooks run|endpoints|deliveries|resend|recover`, in a process of their own, on both databases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oncemore import Webhooks
from oncemore.webhooks import Sender
from tests.tools.command import oncemore
from tests.webhooks.conftest import guard, hooks, make, send, url, webhooks
from tests.webhooks.hooks import Hooks, response

__all__ = ["guard", "hooks", "make", "url", "webhooks"]


def test_run_delivers_by_webhooks_or_sender(webhooks: Webhooks, url: str, hooks: Hooks, tmp_path: Path) -> None:
    webhooks.endpoints.create(hooks.url())
    module = f"""
from oncemore import Guard, Webhooks
from oncemore.webhooks import Sender
webhooks = Webhooks(Guard({url!r}), allow=["127.0.0.0/8"], allow_http=True)
sender = Sender(webhooks)
"""
    (tmp_path / "my_shop.py").write_text(module)
    for n, name in enumerate(("webhooks", "sender")):
        send(webhooks, n)
        found = oncemore("webhooks", "run", f"my_shop:{name}", "--once", "--json", folder=tmp_path)
        assert found.json == {"delivered": 1}
    assert hooks.data == [0, 1]
    refused = oncemore("webhooks", "run", "my_shop:Guard", "--once", folder=tmp_path)
    assert refused.code != 0
    assert "not a Sender or Webhooks" in refused.err


def test_endpoints_are_listed_without_secrets(webhooks: Webhooks, url: str, hooks: Hooks) -> None:
    made = webhooks.endpoints.create(hooks.url(), tenant="acme", headers={"Authorization": "Bearer hidden"})
    webhooks.endpoints.create(hooks.url(), tenant="other", disabled=True)
    found = oncemore("webhooks", "endpoints", "--tenant", "acme", "--json", "--store", url)
    (shown,) = found.json
    assert (shown["id"], shown["url"], shown["state"]) == (made.id, made.url, "enabled")
    text = oncemore("webhooks", "endpoints", "--store", url).out
    for secret in (str(made.secret), "hidden"):
        assert secret not in found.out + text
    (disabled,) = oncemore("webhooks", "endpoints", "--state", "disabled", "--json", "--store", url).json
    assert disabled["tenant"] == "other"


def test_dead_letter_is_listed_resent_and_recovered(make: Any, url: str, hooks: Hooks) -> None:
    webhooks = make(schedule=[0])
    hooks.answer = lambda _: response(500, b"broken")
    endpoint = webhooks.endpoints.create(hooks.url())
    (id,) = send(webhooks, 1)
    Sender(webhooks).run_once()
    (dead,) = oncemore("webhooks", "deliveries", "--state", "dead", "--json", "--store", url).json
    assert (dead["message_id"], dead["endpoint"], dead["error"]) == (id, endpoint.id, "status 500")
    assert [each["response"] for each in dead["attempts"]] == ["broken"]
    assert id in oncemore("webhooks", "deliveries", "--store", url).out
    assert oncemore("webhooks", "resend", dead["id"], "--json", "--store", url).json == {"resent": [dead["id"]]}
    Sender(webhooks).run_once()
    assert len(hooks.arrived) == 2
    assert oncemore("webhooks", "recover", endpoint.id, "--json", "--store", url).json == {"recovered": 1}
    assert oncemore("webhooks", "resend", "999", "--store", url).code != 0
    assert oncemore("webhooks", "recover", endpoint.id, "--since", "x", "--store", url).code != 0
