"""Run one server, and end it when whoever asked for it ends: a killed test run leaves nothing behind.

Called as `python -I -S keeper.py FOLDER SIGNAL USER COMMAND...`; prints the server's process id.  When standard input
ends, which it does however the other end dies, the server gets SIGNAL and FOLDER is removed.  When the server ends by
itself, FOLDER stays, for a restart.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import threading

PATIENCE = 10.0  # seconds between SIGNAL and SIGKILL


def keep(folder: str, signal: int, user: str, command: list[str]) -> int:
    """The server's exit code, once it has ended."""
    # A supplementary group of root's would defeat the change of user.
    account = {"user": user, "group": group_of(user), "extra_groups": []} if user else {}
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, **account)  # type: ignore[call-overload]
    print(server.pid, flush=True)
    abandoned = threading.Event()
    threading.Thread(target=end_with_input, args=(server, signal, abandoned), daemon=True).start()
    code: int = server.wait()
    if abandoned.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code


def end_with_input(server: "subprocess.Popen[bytes]", signal: int, abandoned: threading.Event) -> None:
    """Wait for standard input to end, then end the server."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held here, would abort the interpreter's own exit
        pass
    abandoned.set()
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(signal)
    try:
        server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()


def group_of(user: str) -> int:
    """The user's own group."""
    return pwd.getpwnam(user).pw_gid


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
