"""The app `"oncemore.web.django"` for INSTALLED_APPS.  It has no models; `manage.py check` then checks the settings."""

from __future__ import annotations

import warnings
from typing import Any

from django.apps import AppConfig  # type: ignore[import-untyped]
from django.conf import settings  # type: ignore[import-untyped]
from django.core import checks  # type: ignore[import-untyped]

from ...errors import ConfigurationError

MIDDLEWARE = "oncemore.web.django.IdempotencyMiddleware"


class OncemoreConfig(AppConfig):  # type: ignore[misc]
    """Registers the system checks."""

    name = "oncemore.web.django"
    label = "oncemore"

    def ready(self) -> None:
        checks.register(check_settings)


def check_settings(**_: Any) -> list[Any]:
    """Return the faults of `settings.ONCEMORE` and of the middleware's place as messages of Django's system checks."""
    if MIDDLEWARE not in settings.MIDDLEWARE:
        hint = f'Write MIDDLEWARE += ["{MIDDLEWARE}"].'
        return [checks.Warning("IdempotencyMiddleware is not in MIDDLEWARE.", hint=hint, id="oncemore.W001")]
    from . import IdempotencyMiddleware

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            IdempotencyMiddleware(lambda request: None)
        except ConfigurationError as error:
            return [checks.Error(error.detail, id="oncemore.E001")]
    return [checks.Warning(str(each.message), id="oncemore.W002") for each in caught]
