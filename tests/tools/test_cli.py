"""The `oncemore` command finds its subcommands, and helps who has lost the way."""

import pytest

from oncemore.tools.cli import COMMANDS, main


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_names_every_command(argv, capsys) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_an_unknown_command_is_told_the_nearest(capsys) -> None:
    assert main(["simulat"]) == 2
    assert "did you mean 'simulate'" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip()[0].isdigit()


def test_a_command_gets_the_rest_of_the_words(capsys) -> None:
    assert main(["simulate", "retries", "--clients", "200", "--policy", "full jitter"]) == 0
    assert "full jitter" in capsys.readouterr().out
