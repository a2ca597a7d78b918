"""Writes docs/reference/cli.md from the commands themselves: python docs/_generate/cli.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from oncemore.tools.cli import EXIT_CODES
from oncemore.tools.commands.program import COMMANDS, program

PAGE = Path(__file__).parents[1] / "reference" / "cli.md"

HEAD = """\
# The command line

```bash
pip install 'oncemore[cli]'
oncemore --help
```

Every command has `--help`, and `--json` for programs. The ledger is named by `--store URL` or by the environment variable `ONCEMORE_STORE`; every URL of a
[store](../howto/stores.md) will do. A command that only looks makes no ledger where there is none. What changes something asks first, or wants `--yes`.

A password on a command line can be seen by everyone on the machine: put such a URL into `ONCEMORE_STORE`.

Where [outcomes are encrypted](../howto/encryption.md), give the keys by `ONCEMORE_SEAL_KEYS`, in base64, the one that seals first, with blanks between them. `keys show --outcome` then opens what
is stored, and `keys resolve` seals what it writes; without them, what it writes would not open.

*This page is made from the commands: `python docs/_generate/cli.py`.*

## Exit codes

| code | meaning |
| --- | --- |
"""

TAIL = """
With `--json`, an error is a JSON object on standard error, with `error_code`, `title`, `detail` and `retryable`, as on the pages of the [errors](../errors/index.md).

## Shell completion

```bash
eval "$(oncemore --completion bash)"
```

in `~/.bashrc`; for zsh the same with `zsh`; for fish `oncemore --completion fish | source`.
"""


def leaves(
    group: click.Group, context: click.Context, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Each command that does something, with the words that call it."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command, context, (*path, name))
        else:
            yield " ".join((*path, name)), command


def section(words: str, command: click.Command) -> str:
    with click.Context(command, info_name=f"oncemore {words}") as context:
        arguments = [param for param in command.params if isinstance(param, click.Argument)]
        usage = " ".join(["oncemore", words, *(param.make_metavar(context) for param in arguments)])
        options = [param for param in command.params if isinstance(param, click.Option)]
        rows = [record for option in options if (record := option.get_help_record(context))]
    text = re.sub(r"\n +", "\n", (command.help or "").strip())
    table = "\n".join(f"| `{names}` | {what} |" for names, what in (map(escape, row) for row in rows))
    return f"## oncemore {words}\n\n{text}\n\n`{usage}`\n\n| option | |\n| --- | --- |\n{table}\n"


def escape(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    context = click.Context(program)
    sections = "\n".join(section(*found) for found in leaves(program, context))
    listed = "".join(f"- `{name}`: {what}\n" for name, (_, what) in COMMANDS.items())
    return f"{HEAD}{codes}{TAIL}\n## Commands\n\n{listed}\n{sections}"


if __name__ == "__main__":
    PAGE.write_text(page())
