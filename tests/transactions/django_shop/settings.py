"""The project's settings, from the environment, and its `wsgi()` and `asgi()`."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
from psycopg import IsolationLevel
from psycopg.conninfo import conninfo_to_dict

from oncemore import Contract, Rule

SECRET_KEY = "-"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.transactions.django_shop.urls"
USE_TZ = True
INSTALLED_APPS = ["tests.transactions.django_shop"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
MIDDLEWARE = ["oncemore.web.django.IdempotencyMiddleware"]
LOGGING_CONFIG = None


def database(url: str) -> dict[str, Any]:
    if url.startswith("sqlite:///"):
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": url.removeprefix("sqlite:///")}
    said = conninfo_to_dict(url)
    names = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    return {
        "ENGINE": "django.db.backends.postgresql",
        **{ours: said.get(name, "") for ours, name in names.items()},
        "OPTIONS": {"isolation_level": IsolationLevel.SERIALIZABLE},
    }


# The shop is not the default database: any alias will do.
DATABASES = {
    "default": {},
    "shop": {**database(os.environ["DATABASE"]), "ATOMIC_REQUESTS": os.environ["ATOMIC"] == "requests"},
}
CONTRACT = Contract(Rule("POST /{kind}/{what}", key="required", effect="transaction"))
ONCEMORE = {
    "guard": "django:shop",
    "contract": "tests.transactions.django_shop.settings.CONTRACT",
    "principal": "tests.transactions.django_shop.settings.principal",
}


def principal(request: Any) -> str:
    return "alice"


def make_tables() -> None:
    from django.db import connections

    from .models import Doctor, Refund

    with connections["shop"].schema_editor() as editor:
        editor.create_model(Refund)
        editor.create_model(Doctor)
    Doctor.objects.using("shop").bulk_create([Doctor(name="ann", on_call=True), Doctor(name="bob", on_call=True)])
    connections["shop"].close()


def ready() -> None:
    django.setup()
    with ThreadPoolExecutor(1) as pool:  # an ASGI server calls this on its loop, where Django does not let us wait
        pool.submit(make_tables).result()


def wsgi() -> Any:
    from django.core.wsgi import get_wsgi_application

    ready()
    return get_wsgi_application()


def asgi() -> Any:
    from django.core.asgi import get_asgi_application

    ready()
    return get_asgi_application()
