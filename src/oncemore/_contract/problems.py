"""Faults in what a programmer wrote: gathered first, told together, each with the way to mend it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

from ..errors import ConfigurationError


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint such as ` (did you mean 'ttl'?)`, or nothing when no choice is near."""
    folded = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[near[0]]!r}?)" if near else ""


def listing(place: str, faults: Sequence[str]) -> ConfigurationError:
    """One error for all *faults*; a single one stays on one line."""
    if len(faults) == 1:
        return ConfigurationError(f"{place}: {faults[0]}")
    lines = "".join(f"\n  - {fault}" for fault in faults)
    return ConfigurationError(f"{place}: {len(faults)} faults{lines}")


class Faults:
    """A list that catches configuration errors, so that reading can go on to the next one."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextmanager
    def caught(self, place: str = "") -> Iterator[None]:
        """Note a ConfigurationError raised inside, prefixed with *place*, instead of letting it out."""
        try:
            yield
        except ConfigurationError as error:
            self.found.append(f"{place}: {error.detail}" if place else error.detail)
