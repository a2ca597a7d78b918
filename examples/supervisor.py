"""Runs one server, and ends it when the parent process ends, so that a killed test run leaves no server behind.

Called as `python -I -S supervisor.py FOLDER SIGNAL USER COMMAND...`; prints the server's process id.  The kernel closes
standard input however the parent dies; the server then gets SIGNAL, and FOLDER is removed.  If the server ends by itself,
FOLDER stays for a restart.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import threading

PATIENCE = 10.0  # seconds between SIGNAL and SIGKILL


def supervise(folder: str, signal: int, user: str, command: list[str]) -> int:
    """Run the server until it ends, and return its exit code."""
    # Without this, the server would keep root's supplementary groups.
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
    while os.read(0, 4096):  # not sys.stdin: a daemon thread that holds its lock aborts the interpreter's exit
        pass
    abandoned.set()
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(signal)
    try:
        server.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        server.kill()


def group_of(user: str) -> int:
    """Return the number of the user's primary group."""
    return pwd.getpwnam(user).pw_gid


if __name__ == "__main__":
    sys.exit(supervise(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
