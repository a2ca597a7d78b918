"""Problems in a configuration: collected first, then reported together, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

from ..errors import ConfigurationError


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a hint such as ` (did you mean 'ttl'?)`, or an empty text if no choice is near."""
    folded = {choice.lower(): choice for choice in choices}
    near = get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[near[0]]!r}?)" if near else ""


def unknown(value: object, choices: Iterable[object], more: str = "") -> ConfigurationError:
    """Return the error for a value that is none of the choices, with a hint to the nearest one."""
    shown = {str(choice): repr(choice) for choice in choices}
    same = shown.get(str(value))  # 409 if '409' was written
    hint = f" (did you mean {same}?)" if same else did_you_mean(str(value), shown)
    return ConfigurationError(f"{value!r} is unknown{hint}: choose one of {', '.join(shown.values())}{more}")


def listing(place: str, problems: Sequence[str]) -> ConfigurationError:
    """Return one error for all *problems*.  A single problem stays on one line."""
    if len(problems) == 1:
        error = ConfigurationError(f"{place}: {problems[0]}")
    else:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        error = ConfigurationError(f"{place}: {len(problems)} faults{lines}")
    error.faults = tuple(problems)
    return error


class Problems(list[str]):
    """The problems found so far, so that reading can go on to the next one."""

    @contextmanager
    def collecting(self, place: str = "") -> Iterator[None]:
        """Add a ConfigurationError raised inside, prefixed with *place*, instead of raising it."""
        try:
            yield
        except ConfigurationError as error:
            self.append(f"{place}: {error.detail}" if place else error.detail)
