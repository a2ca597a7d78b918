"""Writes docs/reference/cli.md from the commands themselves: python docs/_generate/cli.py"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click

from oncemore.tools.cli import EXIT_CODES
from oncemore.tools.commands import COMMANDS, program

PAGE = Path(__file__).parents[1] / "reference" / "cli.md"

HEAD = """\
# The command line

```bash
pip install 'oncemore[cli]'
oncemore --help
```

Every command has `--help`, and `--json` for programs.
Name the ledger by `--store URL` or by the environment variable `ONCEMORE_STORE`; any URL of a [store](../howto/stores.md) works.
Only `init` creates a ledger; the other commands refuse a URL that has none.
Commands that change something ask first, or need `--yes`.

All users of a machine can see its command lines: put a URL with a password into `ONCEMORE_STORE`.

If [outcomes are encrypted](../howto/encryption.md), set `ONCEMORE_SEAL_KEYS` to the keys in base64, separated by spaces, the one that encrypts first.
`keys show --outcome` then decrypts the outcome, and `keys resolve` encrypts the one that it writes.
Without the keys, the service could not read an outcome that `keys resolve` wrote.

*This page is generated from the commands: `python docs/_generate/cli.py`.*

## Exit codes

| code | meaning |
| --- | --- |
"""

TAIL = """
With `--json`, an error is a JSON object on standard error, with `error_code`, `title`, `detail` and `retryable`; each code has a [page](../errors/index.md).

## Shell completion

```bash
eval "$(oncemore --completion bash)"
```

Write this line into `~/.bashrc`.
For zsh, replace `bash` by `zsh`; for fish, use `oncemore --completion fish | source`.
"""


def leaves(
    group: click.Group, context: click.Context, path: tuple[str, ...] = ()
) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that is not a group, with the words that call it."""
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
