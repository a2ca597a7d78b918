"""The project's models."""

from __future__ import annotations

from django.db import models


class Refund(models.Model):
    name = models.CharField(max_length=200)


class Doctor(models.Model):
    name = models.CharField(max_length=20, primary_key=True)
    on_call = models.BooleanField()
