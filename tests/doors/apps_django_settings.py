"""The settings of the Django project that the door's tests serve, and its `wsgi()` and `asgi()`."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import django
from django.core.management import call_command

from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule

SECRET_KEY = "-"
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "tests.doors.apps_django"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django.contrib.sessions", "rest_framework"]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "oncemore.web.django.IdempotencyMiddleware",
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("DATABASE", ":memory:"),
        "ATOMIC_REQUESTS": True,
        "OPTIONS": {"timeout": 20},
    }
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 50_000
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates"}]
LOGGING = {"version": 1, "disable_existing_loggers": False}

CONTRACT = Contract(
    Rule("POST /{kind}/released", streams="release", lease="300ms", on_unknown="hold"),
    Rule("POST /{kind}/buffered", streams="store"),
    Rule("POST /{kind}/file", max_response=1000),
    Rule("POST /{kind}/small", max_request=1000),
    Rule("PUT /{kind}/thing/{name}", if_match=True, key="required"),
    Rule("POST /{kind}/by-body", key="body:/id"),
    Rule("POST /{kind}/frozen", lease="300ms", on_unknown="retry"),
    Rule("POST /{kind}/brief", lease="300ms", on_unknown="hold"),
)
ONCEMORE = {
    "guard": os.environ.get("STORE", "memory://"),
    "contract": "tests.doors.apps_django_settings.CONTRACT",
    "redact": "tests.doors.apps_django_settings.redact",
}


def redact(outcome: object) -> object:
    return outcome


def ready() -> None:
    django.setup()
    with ThreadPoolExecutor(1) as pool:  # an ASGI server calls this on its loop, where Django does not let us wait
        pool.submit(call_command, "migrate", verbosity=0).result()


def wsgi() -> Any:
    from django.core.wsgi import get_wsgi_application

    ready()
    return get_wsgi_application()


def asgi() -> Any:
    from django.core.asgi import get_asgi_application

    ready()
    return get_asgi_application()
