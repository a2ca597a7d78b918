"""Message brokers for tests: NATS from a wheel, RabbitMQ from the system, SQS by ministack, Kafka by a mock."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sys
import sysconfig
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from examples.process import Server, free_port

from .valkey import wait_until


class NatsServer(Server):
    """A private NATS server with JetStream on disk; `crash` is kill -9.  With *fsync*, each message is synced first."""

    def __init__(self, *, fsync: bool = False, cluster: NatsCluster | None = None, limits: str = "") -> None:
        super().__init__()
        self.fsync = fsync
        self.cluster = cluster
        self.limits = limits
        self.cluster_port = free_port() if cluster else 0
        self.name = f"n{secrets.token_hex(4)}"

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        sync = "sync_interval: always" if self.fsync else ""
        lines = [
            f"listen: 127.0.0.1:{self.port}",
            f"server_name: {self.name}",
            f'pid_file: "{self.folder / "pid"}"',
            f'jetstream {{ store_dir: "{self.folder / "data"}"; {sync} }}',
            self.limits,
        ]
        if self.cluster:
            routes = ", ".join(f'"nats://127.0.0.1:{node.cluster_port}"' for node in self.cluster.servers)
            lines.append(f"cluster {{ name: tests; listen: 127.0.0.1:{self.cluster_port}; routes: [{routes}] }}")
        program = Path(sysconfig.get_path("scripts")) / "nats-server"
        return [str(program), "-c", str(self.write("nats.conf", "\n".join(lines)))]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            if int((self.folder / "pid").read_text()) == self.pid and "Server is ready" in self.log:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
                    return connection.recv(4) == b"INFO"
        return False


class NatsCluster:
    """Three NATS servers whose streams have three replicas."""

    def __init__(self, *, fsync: bool = False) -> None:
        self.servers: list[NatsServer] = []
        self.servers.extend(NatsServer(fsync=fsync, cluster=self) for _ in range(3))

    @property
    def url(self) -> str:
        return "nats://" + ",".join(f"127.0.0.1:{node.port}" for node in self.servers)

    def node(self, name: str) -> NatsServer:
        """Return the server with this name, for instance the leader of a stream."""
        return next(node for node in self.servers if node.name == name)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            for node in self.servers:
                undo.enter_context(node)
            wait_until(lambda: any("JetStream cluster new metadata leader" in n.log for n in self.servers), "a leader")
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()


class PortMapper(Server):
    """Erlang's epmd, on a port of its own: without it, RabbitMQ would leave one behind that all nodes share."""

    user = "rabbitmq" if os.geteuid() == 0 else ""

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return ["epmd", "-address", "127.0.0.1", "-port", str(self.port)]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True
        return False


class RabbitServer(Server):
    """A private RabbitMQ node, if the system has rabbitmq-server; `crash` is kill -9 of its Erlang machine."""

    user = PortMapper.user
    folder_of_programs = "/usr/lib/rabbitmq/bin"

    def __init__(self) -> None:
        super().__init__()
        self._mapper = PortMapper()
        self._password = secrets.token_hex(16)
        self._distribution_port = free_port()

    @classmethod
    def program(cls) -> str | None:
        """Return the path of the program, or None if it is not installed."""
        return shutil.which("rabbitmq-server", path=cls.folder_of_programs)

    @property
    def url(self) -> str:
        return f"amqp://tests:{self._password}@127.0.0.1:{self.port}"

    def prepare(self) -> None:
        self._mapper.start()
        self.write("enabled_plugins", "[].")

    def command(self) -> list[str]:
        program = self.program()
        if program is None:
            raise FileNotFoundError(
                "rabbitmq-server is not installed; Debian and Ubuntu: apt-get install rabbitmq-server"
            )
        lines = [
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "default_user = tests",
            f"default_pass = {self._password}",
            "vm_memory_high_watermark.absolute = 1GB",
            "disk_free_limit.absolute = 50MB",
        ]
        environment = {
            "HOME": self.folder,
            "RABBITMQ_NODENAME": f"tests{self.port}@localhost",
            "RABBITMQ_CONFIG_FILE": self.write("rabbitmq.conf", "\n".join(lines) + "\n"),
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": self.folder,
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "enabled_plugins",
            "RABBITMQ_DIST_PORT": self._distribution_port,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} +S 1:1",
            "ERL_EPMD_PORT": self._mapper.port,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the Erlang machine, so that a kill reaches it
        }
        return ["env", *(f"{name}={value}" for name, value in environment.items()), program]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"  # a method frame: Connection.Start
        return False

    def stop(self) -> None:
        super().stop()
        self._mapper.stop()


class MinistackServer(Server):
    """SQS by ministack, in memory."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def queue_url(self, name: str) -> str:
        """Return the broker URL of a queue; any credentials will do."""
        return f"sqs://tests:tests@us-east-1/{name}?endpoint={self.url}"

    def command(self) -> list[str]:
        environment = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": self.port, "SERVICES": "sqs", "TMPDIR": self.folder}
        return ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-m", "ministack"]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{self.url}/_ministack/health", timeout=5) as answer:
                return bool(answer.status == 200)
        return False


class MockKafka:
    """A Kafka cluster of three that librdkafka imitates in this process, on real sockets; it keeps nothing on disk."""

    def __init__(self) -> None:
        self._producer: Any = None
        self.url = ""

    def __enter__(self) -> Self:
        from confluent_kafka import Producer

        self._producer = Producer({"bootstrap.servers": "mock", "test.mock.num.brokers": 3})
        brokers = self._producer.list_topics(timeout=60).brokers.values()
        self.url = "kafka://" + ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        return self

    def __exit__(self, *_: object) -> None:
        self._producer = None  # the cluster ends with it
