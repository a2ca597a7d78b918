"""A new Django project with the middleware: its checks, its tests, and the place of its ledger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

VIEWS = """
from django.http import JsonResponse
from django.urls import path
from django.contrib.auth.models import Group

def pay(request):
    Group.objects.create(name=f"g{Group.objects.count()}")
    return JsonResponse({"groups": Group.objects.count()}, status=201)

urlpatterns = [path("pay", pay), path("watched", pay)]
"""
TESTS = """
from django.contrib.auth.models import Group
from django.test import AsyncClient, TestCase, TransactionTestCase

class Cases:
    def test_replayed(self):
        headers = {"Idempotency-Key": "k", "Authorization": "a"}
        first = self.client.post("/pay", {"amount": 1}, "application/json", headers=headers)
        again = self.client.post("/pay", {"amount": 1}, "application/json", headers=headers)
        self.assertEqual((first.status_code, first.headers["Idempotency-Status"]), (201, "stored"))
        self.assertEqual(again.headers["Idempotency-Status"], "replayed")
        self.assertEqual(Group.objects.count(), 1)

    test_ledger_is_empty_again = test_replayed

    def test_shadow(self):
        headers = {"Idempotency-Key": "k", "Authorization": "a"}
        answers = [self.client.post("/watched", {}, "application/json", headers=headers) for _ in range(2)]
        self.assertEqual([answer.json()["groups"] for answer in answers], [1, 2])
        self.assertNotIn("Idempotency-Status", answers[1].headers)

    async def test_async_client(self):
        headers = {"Idempotency-Key": "k", "Authorization": "a"}
        answers = [await AsyncClient().post("/pay", {}, "application/json", headers=headers) for _ in range(2)]
        self.assertEqual([answer.status_code for answer in answers], [201, 201])

class InOneTransaction(Cases, TestCase): ...
class InMany(Cases, TransactionTestCase): ...
"""
CONTRACT = """
[[rule]]
match = "POST /pay"
key = "required"
effect = "transaction"

[[rule]]
match = "POST /watched"
enforce = false

[[rule]]
match = "POST /pya"
"""


@pytest.fixture(params=["sqlite:///once.db", "django:default"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Make a project by `django-admin startproject`, and append the lines of the page."""
    subprocess.run([sys.executable, "-m", "django", "startproject", "shop", str(tmp_path)], check=True)
    with (tmp_path / "shop" / "settings.py").open("a") as settings:
        settings.write('\nMIDDLEWARE += ["oncemore.web.django.IdempotencyMiddleware"]\n')
        settings.write('INSTALLED_APPS += ["oncemore.web.django"]\n')
        settings.write(f'ONCEMORE = {{"guard": "{request.param}", "contract": "oncemore.toml"}}\n')
    (tmp_path / "shop" / "urls.py").write_text(VIEWS)
    (tmp_path / "shop" / "tests.py").write_text(TESTS)
    (tmp_path / "oncemore.toml").write_text(CONTRACT)
    return tmp_path


def manage(project: Path, *words: str, folder: Path | None = None) -> tuple[int, str]:
    command = [sys.executable, str(project / "manage.py"), *words]
    ran = subprocess.run(command, cwd=folder or project, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def test_manage_py_test_has_an_empty_ledger_for_each_test(project: Path) -> None:
    code, said = manage(project, "test", "shop")
    assert code == 0, said
    assert "Ran 8 tests" in said
    assert "No route of the app serves the rule 'POST /pya'" in said
    assert not (project / "once.db").exists()


def test_manage_py_check_finds_mistakes_in_the_settings(project: Path) -> None:
    assert manage(project, "check")[0] == 0
    settings = project / "shop" / "settings.py"
    written = settings.read_text()
    settings.write_text(written + '\nONCEMORE["contact"] = "oncemore.toml"\n')
    code, said = manage(project, "check")
    assert (code, "oncemore.E001" in said, "did you mean 'contract'" in said) == (1, True, True)
    settings.write_text(written + "\nMIDDLEWARE.remove('oncemore.web.django.IdempotencyMiddleware')\n")
    assert "oncemore.W001" in manage(project, "check")[1]
    settings.write_text(written + "\nMIDDLEWARE.reverse()\n")
    assert "oncemore.W002" in manage(project, "check")[1]


@pytest.mark.parametrize("project", ["sqlite:///once.db"], indirect=True)
def test_relative_ledger_is_in_base_dir_whatever_the_folder(
    project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    code = "from oncemore.web.django import guard_of; print(guard_of('sqlite:///once.db?timeout=1s').store.path)"
    ran = manage(project, "shell", "-v", "0", "-c", code, folder=tmp_path_factory.mktemp("elsewhere"))
    assert ran[1].strip().splitlines()[-1] == str(project / "once.db")
