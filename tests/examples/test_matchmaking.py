"""The matchmaking service over HTTP: every row of its tables of endpoints, offers and refusals."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from openapi_spec_validator import validate

from examples.matchmaking.app import CONTRACT
from examples.matchmaking.processes import Matchmaking, new_key
from examples.program import http
from oncemore import Contract

from .matchmaking import ForkedMatchmaking, ann, bob, code, dating

__all__ = ["ann", "bob", "dating"]

DUPLICATE, MISMATCH, STATE = (
    "CONFLICT.idempotency.duplicate",
    "CONFLICT.idempotency.payload_mismatch",
    "CONFLICT.state",
)


class Case(NamedTuple):
    """One request with a key: its path and body, another body for the same path, its status and the effect that it has."""

    path: str
    body: dict[str, Any]
    other: dict[str, Any]
    status: int
    effect: str


# Each makes the request of one row of the table of idempotent endpoints, for two new users.
Row = Callable[[Matchmaking, str, str], Case]


def otp_send(dating: Matchmaking, ann: str, bob: str) -> Case:
    return Case("/auth/otp/send", {"phone": f"+1-{ann}"}, {"phone": f"+2-{ann}"}, 200, "otp.sent")


def otp_verify(dating: Matchmaking, ann: str, bob: str) -> Case:
    asked = send_code(dating, f"+1-{ann}")
    return Case("/auth/otp/verify", asked, {**asked, "code": "none"}, 200, "tokens.issued")


def photos(dating: Matchmaking, ann: str, bob: str) -> Case:
    photo = {"url": "https://example.com/1.jpg", "sha256": "11"}
    return Case("/users/me/photos", photo, {**photo, "sha256": "22"}, 201, "photo.added")


def responses(dating: Matchmaking, ann: str, bob: str) -> Case:
    return Case(
        "/compatibility/responses", {"responses": {"q": "yes"}}, {"responses": {"q": "no"}}, 200, "responses.saved"
    )


def verification(dating: Matchmaking, ann: str, bob: str) -> Case:
    return Case("/verification/session", {"kind": "selfie"}, {"kind": "document"}, 201, "verification.started")


def action(dating: Matchmaking, ann: str, bob: str) -> Case:
    path = f"/matches/offers/{dating.offers(ann, bob)[ann]}/action"
    return Case(path, {"action": "accept"}, {"action": "pass"}, 200, "offer.answered")


def unmatch(dating: Matchmaking, ann: str, bob: str) -> Case:
    return Case(f"/matches/{dating.match(ann, bob)}/unmatch", {}, {"why": "other"}, 200, "match.closed")


def messages(dating: Matchmaking, ann: str, bob: str) -> Case:
    body = {"content": "Hello!", "clientMessageId": new_key()}
    other = {**body, "content": "Bye!"}
    return Case(f"/matches/{dating.match(ann, bob)}/messages", body, other, 201, "message.created")


def read(dating: Matchmaking, ann: str, bob: str) -> Case:
    match = dating.match(ann, bob)
    first, second = (send(dating, bob, match, text).json()["messageId"] for text in ("one", "two"))
    return Case(f"/matches/{match}/read", {"messageId": second}, {"messageId": first}, 200, "read.marked")


def report(dating: Matchmaking, ann: str, bob: str) -> Case:
    body = {"subjectId": bob, "category": "spam", "text": "once"}
    return Case("/safety/report", body, {**body, "text": "twice"}, 201, "report.filed")


def block(dating: Matchmaking, ann: str, bob: str) -> Case:
    return Case("/safety/block", {"subjectId": bob}, {"subjectId": "somebody"}, 200, "user.blocked")


def appeal(dating: Matchmaking, ann: str, bob: str) -> Case:
    body = {"decisionId": "d-1", "text": "please"}
    return Case("/safety/appeal", body, {**body, "text": "again"}, 201, "appeal.filed")


ROWS: list[Row] = [
    otp_send,
    otp_verify,
    photos,
    responses,
    verification,
    action,
    unmatch,
    messages,
    read,
    report,
    block,
    appeal,
]
every_row = pytest.mark.parametrize("row", ROWS)


def send_code(dating: Matchmaking, phone: str) -> dict[str, str]:
    dating.post("/auth/otp/send", {"phone": phone}).raise_for_status()
    found: dict[str, str] = http.get(f"{dating.url}/_test/otp", params={"phone": phone}).json()
    return found


def send(dating: Matchmaking, user: str, match: str, content: str, id: str | None = None) -> httpx.Response:
    body = {"content": content, "clientMessageId": id or new_key()}
    return dating.post(f"/matches/{match}/messages", body, user)


def act(dating: Matchmaking, user: str, offer: str, action: str, key: str | None = None) -> httpx.Response:
    return dating.post(f"/matches/offers/{offer}/action", {"action": action}, user, key)


def all_effects(dating: Matchmaking) -> list[Any]:
    found: list[Any] = dating.get("/_test/effects")["effects"]
    return found


# The seed's three test cases, for each row of the table


@every_row
def test_duplicate_request(dating: Matchmaking, ann: str, bob: str, row: Row) -> None:
    case, key = row(dating, ann, bob), new_key()
    first = dating.post(case.path, case.body, ann, key)
    assert first.status_code == case.status, first.text
    assert first.headers["idempotency-status"] == "stored"
    state = all_effects(dating)
    assert state[-1]["kind"] == case.effect
    again = dating.post(case.path, case.body, ann, key)
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again.headers["idempotency-status"] == "replayed"
    assert all_effects(dating) == state


@every_row
@pytest.mark.parametrize("fault", ["error", "kill"])
def test_retry_after_failure(dating: Matchmaking, ann: str, bob: str, row: Row, fault: str) -> None:
    # A process that was killed is restarted with the real time; with another one, its lease would not lapse for hours.
    dating.hook("clock", {"at": datetime.now(UTC).isoformat()})
    case, key = row(dating, ann, bob), new_key()
    before = all_effects(dating)
    if fault == "kill":
        assert dating.dies(lambda: dating.post(case.path, case.body, ann, key, fault=fault))
    else:
        assert dating.post(case.path, case.body, ann, key, fault=fault).status_code == 500
    assert all_effects(dating) == before
    answer = dating.post(case.path, case.body, ann, key)
    assert answer.status_code == case.status, answer.text
    assert [effect["kind"] for effect in all_effects(dating)[len(before) :]] == [case.effect]


@every_row
def test_concurrent_request(dating: Matchmaking, ann: str, bob: str, row: Row) -> None:
    case, key = row(dating, ann, bob), new_key()
    before = all_effects(dating)
    answers = dating.at_once(10, lambda _: dating.post(case.path, case.body, ann, key, fault="slow:100"))
    assert [answer.status_code for answer in answers] == [case.status] * 10
    assert len({answer.content for answer in answers}) == 1
    told = sorted(answer.headers["idempotency-status"] for answer in answers)
    assert told == ["replayed"] * 9 + ["stored"]
    assert [effect["kind"] for effect in all_effects(dating)[len(before) :]] == [case.effect]


@every_row
def test_same_key_with_another_payload_conflicts(dating: Matchmaking, ann: str, bob: str, row: Row) -> None:
    case, key = row(dating, ann, bob), new_key()
    assert dating.post(case.path, case.body, ann, key).status_code == case.status
    state = all_effects(dating)
    refused = dating.post(case.path, case.other, ann, key)
    assert (refused.status_code, code(refused)) == (409, MISMATCH)
    assert all_effects(dating) == state


def test_same_key_on_another_endpoint_conflicts(dating: Matchmaking, ann: str, bob: str) -> None:
    key = new_key()
    assert dating.post("/safety/block", {"subjectId": bob}, ann, key).status_code == 200
    refused = dating.post("/verification/session", {"kind": "selfie"}, ann, key)
    assert (refused.status_code, code(refused)) == (409, MISMATCH)
    assert dating.post("/verification/session", {"kind": "selfie"}, bob, key).status_code == 201


@every_row
def test_key_must_be_a_uuid_of_version_4(dating: Matchmaking, ann: str, bob: str, row: Row) -> None:
    case = row(dating, ann, bob)
    in_body = "clientMessageId" in case.body
    state = all_effects(dating)
    for key in (None, "once", "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"):
        expected = "VALIDATION.idempotency.key_" + ("missing" if key is None else "invalid")
        body = {name: value for name, value in case.body.items() if name != "clientMessageId"}
        if in_body and key:
            body["clientMessageId"] = key
        refused = dating.ask("POST", case.path, body, user=ann, key=None if in_body else key)
        assert (refused.status_code, code(refused)) == (400, expected)
    assert all_effects(dating) == state


@every_row
def test_outcome_expires_with_its_key(dating: Matchmaking, ann: str, bob: str, row: Row) -> None:
    """After 24 hours, or the time in the table, the same key is new: what was done before is then seen by the state."""
    case, key = row(dating, ann, bob), new_key()
    first = dating.post(case.path, case.body, ann, key)
    lasts = {"/auth/otp/send": 600, "/auth/otp/verify": 300, "/verification/session": 300}.get(case.path, 86_400)
    dating.advance(lasts - 60)
    assert dating.post(case.path, case.body, ann, key).content == first.content
    dating.advance(61)
    later = dating.post(case.path, case.body, ann, key)
    assert later.headers["idempotency-status"] == "stored"
    expected = {otp_verify: 409, photos: 409}.get(row, case.status)
    assert later.status_code == expected, later.text


# The rows of the table of idempotent endpoints


def test_otp_send_returns_same_request_id_for_10_minutes(dating: Matchmaking) -> None:
    phone = f"+49-{secrets.token_hex(6)}"
    sent = [dating.post("/auth/otp/send", {"phone": phone}).json() for _ in range(3)]
    dating.advance(590)
    sent.append(dating.post("/auth/otp/send", {"phone": phone}).json())
    assert len({each["requestId"] for each in sent}) == 1
    dating.advance(11)
    later = dating.post("/auth/otp/send", {"phone": phone}).json()["requestId"]
    assert dating.effects("otp.sent")[-2:] == [sent[0]["requestId"], later]
    assert dating.effects("otp.sent").count(sent[0]["requestId"]) == 1


def test_otp_verify_returns_same_tokens_for_5_minutes(dating: Matchmaking) -> None:
    phone, key = f"+49-{secrets.token_hex(6)}", new_key()
    asked = send_code(dating, phone)
    wrong = dating.post("/auth/otp/verify", {**asked, "code": "x"}, key=key)
    assert wrong.status_code == 401
    assert dating.post("/auth/otp/verify", {**asked, "code": "x"}, key=key).headers["idempotency-status"] == "unstored"
    first = dating.post("/auth/otp/verify", asked)
    assert first.status_code == 200
    refused = dating.post("/auth/otp/verify", asked)
    assert (refused.status_code, code(refused)) == (409, STATE)
    dating.advance(600)
    user = dating.post("/auth/otp/verify", send_code(dating, phone)).json()["userId"]
    assert user == first.json()["userId"]  # made once


def test_users_me_patch_last_write_wins(dating: Matchmaking, ann: str) -> None:
    for bio in ("one", "two", "one"):
        answer = dating.ask("PATCH", "/users/me", {"bio": bio}, user=ann, key="not looked at")
        assert answer.status_code == 200
        assert "idempotency-status" not in answer.headers
    assert answer.json() == {"id": ann, "displayName": "", "bio": "one", "timezone": "UTC"}
    assert dating.ask("GET", "/users/me", user=ann).json() == answer.json()
    assert len(dating.effects("profile.changed", ann)) == 3
    assert dating.ask("PATCH", "/users/me", {"timezone": "Mars/Base"}, user=ann).status_code == 422


def test_photo_duplicate_is_rejected(dating: Matchmaking, ann: str, bob: str) -> None:
    photo = {"url": "https://example.com/a.jpg", "sha256": "aa"}
    made = dating.post("/users/me/photos", photo, ann)
    refused = dating.post("/users/me/photos", {**photo, "url": "https://example.com/b.jpg"}, ann)
    assert (refused.status_code, code(refused)) == (409, DUPLICATE)
    assert dating.post("/users/me/photos", photo, bob).status_code == 201
    assert dating.ask("GET", "/users/me/photos", user=ann).json() == {"photos": [made.json()]}


def test_responses_overwrite(dating: Matchmaking, ann: str) -> None:
    first = {"responses": {"smoker": "no", "pets": ["cat"]}}
    assert dating.post("/compatibility/responses", first, ann).json() == first
    second = dating.post("/compatibility/responses", {"responses": {"smoker": "yes"}}, ann)
    assert second.json() == {"responses": {"smoker": "yes", "pets": ["cat"]}}
    assert dating.ask("GET", "/compatibility/responses", user=ann).json() == second.json()


def test_verification_session_is_the_same_for_5_minutes(dating: Matchmaking, ann: str, bob: str) -> None:
    def start(user: str, kind: str) -> str:
        return str(dating.post("/verification/session", {"kind": kind}, user).json()["sessionId"])

    first = start(ann, "selfie")
    assert start(ann, "document") == first
    assert start(bob, "selfie") != first
    dating.advance(301)
    assert start(ann, "selfie") != first
    assert len(dating.effects("verification.started", ann)) == 2


def test_offer_action_returns_same_state(dating: Matchmaking, ann: str, bob: str) -> None:
    offer = dating.offers(ann, bob)[ann]
    answers = [act(dating, ann, offer, "accept") for _ in range(3)]
    assert [answer.json() for answer in answers] == [{"offerId": offer, "state": "accepted", "matchId": None}] * 3
    assert dating.effects("offer.answered", ann) == [offer]
    assert act(dating, bob, offer, "accept").status_code == 404


def test_unmatch_twice_changes_nothing(dating: Matchmaking, ann: str, bob: str) -> None:
    match = dating.match(ann, bob)
    answers = [dating.post(f"/matches/{match}/unmatch", {}, user) for user in (ann, bob, ann)]
    assert [answer.json() for answer in answers] == [{"matchId": match, "state": "closed", "reason": "unmatched"}] * 3
    assert dating.effects("match.closed").count(match) == 1


def test_message_is_deduplicated_by_client_message_id(dating: Matchmaking, ann: str, bob: str) -> None:
    match, id = dating.match(ann, bob), new_key()
    first, again = send(dating, ann, match, "Hello!", id), send(dating, ann, match, "Hello!", id)
    assert (again.status_code, again.content) == (201, first.content)
    other = send(dating, ann, match, "Hi!", id)
    assert (other.status_code, code(other)) == (409, MISMATCH)
    assert send(dating, bob, match, "Hello!", id).json()["messageId"] != first.json()["messageId"]
    listed = dating.ask("GET", f"/matches/{match}/messages", user=bob).json()["messages"]
    assert [each["senderId"] for each in listed] == [ann, bob]
    elsewhere = send(dating, ann, dating.match(ann, dating.sign_in(f"eve-{match}")), "Hello!", id)
    assert elsewhere.status_code == 409


def test_message_to_a_closed_match_conflicts(dating: Matchmaking, ann: str, bob: str) -> None:
    match, id = dating.match(ann, bob), new_key()
    sent = send(dating, ann, match, "Hello!", id)
    dating.post(f"/matches/{match}/unmatch", {}, bob).raise_for_status()
    refused = send(dating, ann, match, "Still there?")
    assert (refused.status_code, code(refused)) == (409, STATE)
    assert send(dating, ann, match, "Hello!", id).content == sent.content


def test_read_mark_never_moves_back(dating: Matchmaking, ann: str, bob: str) -> None:
    match = dating.match(ann, bob)
    ids = [send(dating, bob, match, text).json()["messageId"] for text in ("one", "two")]
    for message in (ids[1], ids[0], ids[1]):
        answer = dating.post(f"/matches/{match}/read", {"messageId": message}, ann)
        assert answer.json() == {"matchId": match, "readUpTo": ids[1]}
    assert dating.effects("read.marked", ann) == [ids[1]]
    assert dating.post(f"/matches/{match}/read", {"messageId": "none"}, ann).status_code == 404


def test_report_duplicate_is_rejected_for_1_hour(dating: Matchmaking, ann: str, bob: str) -> None:
    """Buckets of one hour by reporter, subject and category: the next begins at the full hour."""

    def tell(user: str, category: str, text: str) -> httpx.Response:
        body = {"subjectId": "troll", "category": category, "text": text}
        return dating.post("/safety/report", body, user)

    dating.hook("clock", {"at": "2030-02-19T10:59:00Z"})
    assert tell(ann, "spam", "a").status_code == 201
    refused = tell(ann, "spam", "b")
    assert (refused.status_code, code(refused)) == (409, DUPLICATE)
    assert tell(ann, "abuse", "a").status_code == 201
    assert tell(bob, "spam", "a").status_code == 201
    dating.hook("clock", {"at": "2030-02-19T11:00:01Z"})
    assert tell(ann, "spam", "a").status_code == 201
    assert len(dating.effects("report.filed", ann)) == 3


def test_block_twice_changes_nothing(dating: Matchmaking, ann: str, bob: str) -> None:
    answers = [dating.post("/safety/block", {"subjectId": bob}, ann) for _ in range(3)]
    assert [answer.json() for answer in answers] == [{"subjectId": bob, "blocked": True}] * 3
    assert dating.effects("user.blocked", ann) == [bob]
    assert dating.ask("GET", "/safety/blocks", user=ann).json() == {"subjects": [bob]}


def test_appeal_duplicate_is_rejected_for_24_hours(dating: Matchmaking, ann: str, bob: str) -> None:
    def ask(user: str, text: str) -> httpx.Response:
        return dating.post("/safety/appeal", {"decisionId": "d-7", "text": text}, user)

    assert ask(ann, "a").status_code == 201
    dating.advance(86_300)
    refused = ask(ann, "b")
    assert (refused.status_code, code(refused)) == (409, DUPLICATE)
    assert ask(bob, "a").status_code == 201
    dating.advance(101)
    assert ask(ann, "c").status_code == 201


# The rows of the table of endpoints that are not idempotent


def test_refresh_always_issues_new_tokens(dating: Matchmaking) -> None:
    signed = dating.hook("users", {"id": f"u-{secrets.token_hex(4)}"})
    key = new_key()
    answers = [dating.ask("POST", "/auth/refresh", {"refreshToken": signed["refreshToken"]}, key=key) for _ in range(2)]
    tokens = {answer.json()["accessToken"] for answer in answers} | {signed["accessToken"]}
    assert len(tokens) == 3
    for token in tokens:
        assert http.get(f"{dating.url}/users/me", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    assert all("idempotency-status" not in answer.headers for answer in answers)
    assert len(dating.effects("tokens.issued", signed["id"])) == 2


def test_logout_always_revokes_the_session(dating: Matchmaking, ann: str) -> None:
    other = dating.hook("users", {"id": ann})["accessToken"]
    key = new_key()
    assert dating.post("/safety/block", {"subjectId": "x"}, ann, key).status_code == 200
    answer = dating.ask("POST", "/auth/logout", {}, user=ann)
    assert (answer.status_code, answer.content) == (204, b"")
    assert dating.ask("POST", "/auth/logout", {}, user=ann).status_code == 401
    assert dating.post("/safety/block", {"subjectId": "x"}, ann, key).status_code == 401
    dating.tokens[ann] = other  # the key belongs to the user, not to the token
    assert dating.post("/safety/block", {"subjectId": "x"}, ann, key).headers["idempotency-status"] == "replayed"
    assert len(dating.effects("session.revoked", ann)) == 1


def test_photo_delete_happens_once(dating: Matchmaking, ann: str, bob: str) -> None:
    photo = {"url": "https://example.com/a.jpg", "sha256": "aa"}
    id = dating.post("/users/me/photos", photo, ann).json()["photoId"]
    assert dating.ask("DELETE", f"/users/me/photos/{id}", user=bob).status_code == 404
    assert dating.ask("DELETE", f"/users/me/photos/{id}", user=ann, fault="error").status_code == 500
    key = new_key()
    answers = [dating.ask("DELETE", f"/users/me/photos/{id}", user=ann, key=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [204, 404]
    assert dating.effects("photo.deleted", ann) == [id]
    assert dating.post("/users/me/photos", photo, ann).status_code == 201


# The rows of the table of offer transitions


@pytest.mark.parametrize(("taken", "state"), [("accept", "accepted"), ("pass", "passed"), ("not_now", "not_now")])
def test_offered_becomes_the_state_of_its_action(
    dating: Matchmaking, ann: str, bob: str, taken: str, state: str
) -> None:
    offer = dating.offers(ann, bob)[ann]
    assert [act(dating, ann, offer, taken).json()["state"] for _ in range(2)] == [state, state]
    for other in {"accept", "pass", "not_now"} - {taken}:
        refused = act(dating, ann, offer, other)
        assert (refused.status_code, code(refused)) == (409, STATE)
    shown = dating.ask("GET", f"/matches/offers/{offer}", user=ann).json()
    assert (shown["state"], shown["candidateId"]) == (state, bob)
    assert act(dating, ann, offer, "marry").status_code == 422


def test_accepted_becomes_matched_by_mutual_accept(dating: Matchmaking, ann: str, bob: str) -> None:
    offers = dating.offers(ann, bob)
    assert act(dating, ann, offers[ann], "accept").json()["state"] == "accepted"
    second = act(dating, bob, offers[bob], "accept").json()
    assert second["state"] == "matched"
    assert act(dating, ann, offers[ann], "accept").json() == {**second, "offerId": offers[ann]}
    assert dating.ask("GET", "/matches", user=ann).json()["matches"] == [
        {"matchId": second["matchId"], "users": sorted((ann, bob)), "state": "open", "reason": None}
    ]
    assert dating.effects("match.created", ann, bob) == [second["matchId"]]


def test_both_accept_at_once_makes_one_match(dating: Matchmaking) -> None:
    for _ in range(8):
        ann, bob = (dating.sign_in(f"{name}-{secrets.token_hex(4)}") for name in ("ann", "bob"))
        offers = dating.offers(ann, bob)
        users = [ann, bob]
        answers = dating.at_once(
            2,
            lambda number: act(dating, users[number], offers[users[number]], "accept"),  # noqa: B023
        )
        assert sorted(answer.json()["state"] for answer in answers) == ["accepted", "matched"]
        assert len(dating.effects("match.created", ann, bob)) == 1


def test_matched_becomes_closed_by_unmatch(dating: Matchmaking, ann: str, bob: str) -> None:
    match = dating.match(ann, bob)
    dating.post(f"/matches/{match}/unmatch", {}, bob).raise_for_status()
    shown = dating.ask("GET", f"/matches/{match}", user=ann).json()
    assert (shown["state"], shown["reason"]) == ("closed", "unmatched")
    stranger = dating.sign_in(f"eve-{match}")
    assert dating.post(f"/matches/{match}/unmatch", {}, stranger).status_code == 404
    assert dating.match(ann, bob) != match


# Refusals and documents


@every_row
def test_body_without_its_fields_is_refused(dating: Matchmaking, ann: str, bob: str, row: Row) -> None:
    case = row(dating, ann, bob)
    state = all_effects(dating)
    for name in case.body.keys() - {"clientMessageId"}:
        body = {other: value for other, value in case.body.items() if other != name}
        refused = dating.post(case.path, body, ann)
        assert (refused.status_code, code(refused)) == (422, "VALIDATION.payload")
    assert all_effects(dating) == state


def test_body_is_checked_before_an_answer_of_another_key(dating: Matchmaking, ann: str, bob: str) -> None:
    report = {"subjectId": bob, "category": "spam", "text": "t"}
    assert dating.post("/safety/report", report, ann).status_code == 201
    assert dating.post("/verification/session", {"kind": "selfie"}, ann).status_code == 201
    state = all_effects(dating)
    for path, body in (
        ("/safety/report", {**report, "text": None}),
        ("/safety/report", []),
        ("/verification/session", {}),
        ("/verification/session", {"kind": 1}),
    ):
        refused = dating.post(path, body, ann)
        assert (refused.status_code, code(refused)) == (422, "VALIDATION.payload")
    assert all_effects(dating) == state


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/auth/otp/send", "not JSON"),
        ("/safety/block", "[" * 200_000),
        ("/safety/block", r'{"subjectId": "\u0000"}'),
        ("/safety/block", r'{"subjectId": "\ud800"}'),
        ("/compatibility/responses", r'{"responses": {"\ud800": 1}}'),
        ("/compatibility/responses", r'{"responses": {"q": "\ud800"}}'),
        ("/compatibility/responses", r'{"responses": {"q": 1e400}}'),
    ],
)
def test_body_that_cannot_be_kept_is_refused(dating: Matchmaking, ann: str, path: str, body: str) -> None:
    headers = {
        "Authorization": f"Bearer {dating.tokens[ann]}",
        "Content-Type": "application/json",
        "Idempotency-Key": new_key(),
    }
    refused = http.post(dating.url + path, content=body, headers=headers)
    assert (refused.status_code, code(refused)) == (422, "VALIDATION.payload")


def test_request_without_a_route_is_a_problem(dating: Matchmaking, ann: str) -> None:
    for path, status in (("/nowhere", 404), ("/safety/report", 405), ("/matches/%00", 422)):
        refused = dating.ask("GET", path, user=ann)
        assert refused.status_code == status
        assert code(refused)
    assert http.post(f"{dating.url}/_test/users", json={"id": "eve", "timezone": "Mars/Base"}).status_code == 422


@every_row
def test_unknown_token_is_refused(dating: Matchmaking, ann: str, bob: str, row: Row) -> None:
    case = row(dating, ann, bob)
    if not case.path.startswith("/auth/otp/"):
        for headers in ({}, {"Authorization": "Bearer none"}, {"Authorization": f"Basic {dating.tokens[ann]}"}):
            refused = dating.post(case.path, case.body, **headers)
            assert (refused.status_code, code(refused)) == (401, "AUTH.principal_missing")


def test_reads_need_a_token(dating: Matchmaking) -> None:
    for path in ("/users/me", "/users/me/photos", "/matches/offers", "/matches", "/safety/blocks", "/matches/x"):
        assert dating.ask("GET", path).status_code == 401


def test_contract_and_openapi_show_each_behaviour(dating: Matchmaking) -> None:
    document = dating.get("/openapi.json")
    validate(document)
    rules = Contract.load(CONTRACT).rules
    assert sum(rule.idempotent for rule in rules) == 13
    not_idempotent = {rule.match for rule in rules if not rule.idempotent}
    assert not_idempotent == {"POST /auth/refresh", "POST /auth/logout", "DELETE /users/me/photos/{id}"}
    for rule in rules:
        method, path = rule.match.split(" ")
        operation = document["paths"][path][method.lower()]
        assert operation["x-idempotency"]["name"] == rule.name
        assert operation["x-idempotency"].get("idempotent", True) is rule.idempotent
        assert operation["description"]
        headers = [each["name"] for each in operation.get("parameters", []) if each["in"] == "header"]
        assert ("Idempotency-Key" in headers) == (rule.idempotent and rule.key.source == "header")


def test_metrics_count_from_zero() -> None:
    with ForkedMatchmaking() as fresh:
        names = (
            "idempotency_cache_hit_total",
            "idempotency_key_reuse_conflict_total",
            "retry_attempts_total",
            "retry_exhausted_total",
            "webhook_delivery_success_total",
            "scheduler_job_conflict_total",
        )
        assert [counted(fresh, name) for name in names] == [0.0] * 6
        ann, key = fresh.sign_in("ann"), new_key()
        assert fresh.post("/safety/block", {"subjectId": "x"}, ann, key, fault="error").status_code == 500
        for subject in ("x", "x", "y"):
            fresh.post("/safety/block", {"subjectId": subject}, ann, key)
        for _ in range(2):
            fresh.daily_offers("2026-02-19")
        assert [counted(fresh, name) for name in names] == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]


def counted(service: Matchmaking, name: str) -> float:
    text = http.get(f"{service.url}/metrics").text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


def test_hooks_are_off_by_default() -> None:
    with ForkedMatchmaking(MATCHMAKING_TEST_HOOKS="") as service:
        assert http.post(f"{service.url}/_test/users", json={"id": "ann"}).status_code == 404
        assert http.get(f"{service.url}/_test/effects").status_code == 404
        answer = service.post("/auth/otp/send", {"phone": "+1"}, fault="kill")
        assert answer.status_code == 200


def test_readme_names_every_rule_and_setting() -> None:
    text = (Path(CONTRACT).parent / "README.md").read_text()
    for rule in Contract.load(CONTRACT).rules:
        assert rule.match in text
    for setting in ("DATABASE", "LEDGER", "WEBHOOK_URL", "WEBHOOK_SECRET", "SCHEDULER", "TEST_HOOKS"):
        assert f"MATCHMAKING_{setting}" in text
