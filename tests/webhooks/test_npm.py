"""The providers' JavaScript libraries accept our signatures, and we accept theirs.  Skipped if npm cannot install them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from oncemore.errors import WebhookError
from oncemore.webhooks.schemes import make_scheme
from oncemore.webhooks.signature import Signing

from .senders import OTHER, SECRET, SENDERS

PACKAGES = ("stripe", "svix", "standardwebhooks", "@octokit/webhooks-methods")
BODY = b'{"id": "evt_1", "object": "event", "type": "charge.succeeded", "name": "Zo\xc3\xab"}'
PROGRAM = """
import Stripe from "stripe";
import { Webhook as Svix } from "svix";
import { Webhook as Standard } from "standardwebhooks";
import * as github from "@octokit/webhooks-methods";

const { body, secret, id, now, ours } = JSON.parse(await new Promise((resolve) => {
  let text = ""; process.stdin.on("data", (part) => text += part).on("end", () => resolve(text));
}));
const stripe = new Stripe("sk_test_1");
const date = new Date(now * 1000);
const tried = async (verify) => { try { return (await verify()) !== false; } catch { return false; } };
const accepted = async (signed) => ({
  stripe: await tried(() => stripe.webhooks.constructEvent(body, signed.stripe["Stripe-Signature"], secret)),
  svix: await tried(() => new Svix(secret).verify(body, signed.svix)),
  standard: await tried(() => new Standard(secret).verify(body, signed.standard)),
  github: await tried(() => github.verify(secret, body, signed.github["X-Hub-Signature-256"])),
});
const signature = new Standard(secret).sign(id, date, body);
console.log(JSON.stringify({
  accepted: await accepted(ours.genuine),
  forged: await accepted(ours.forged),
  theirs: {
    stripe: { "Stripe-Signature": stripe.webhooks.generateTestHeaderString({ payload: body, secret, timestamp: now }) },
    svix: { "svix-id": id, "svix-timestamp": `${now}`, "svix-signature": new Svix(secret).sign(id, date, body) },
    standard: { "webhook-id": id, "webhook-timestamp": `${now}`, "webhook-signature": signature },
    github: { "X-Hub-Signature-256": await github.sign(secret, body) },
  },
}));
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("npm")
    command = [npm, "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", *PACKAGES]
    try:
        installed = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not answer in time")
    if installed.returncode:
        pytest.skip("npm could not install the libraries")
    (folder / "check.mjs").write_text(PROGRAM)
    return folder


def test_javascript_libraries_and_ours_accept_each_other(folder: Path) -> None:
    now, id = int(time.time()), "msg_1"
    names = ("stripe", "svix", "standard", "github")

    def signed(secret: str) -> dict[str, dict[str, str]]:
        return {name: SENDERS[name].headers(BODY, id, secret=secret, when=now) for name in names}

    genuine = signed(SECRET)
    genuine["standard"] = Signing(OTHER, SECRET).sign(BODY, id=id, timestamp=now)  # as during a rotation
    given = {"body": BODY.decode(), "secret": SECRET, "id": id, "now": now}
    given["ours"] = {"genuine": genuine, "forged": signed(OTHER)}
    ran = subprocess.run(
        ["node", "check.mjs"], cwd=folder, input=json.dumps(given), capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["accepted"] == dict.fromkeys(names, True)
    assert found["forged"] == dict.fromkeys(names, False)
    for name, headers in found["theirs"].items():
        make_scheme(name, SECRET, {}).verify(list(headers.items()), BODY)
        with pytest.raises(WebhookError):
            make_scheme(name, OTHER, {}).verify(list(headers.items()), BODY)
