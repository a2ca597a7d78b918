"""A ledger in Redis or Valkey: fast, shared by many machines, and as durable as the server is configured to be.

    redis://[user:password@]host:6379/0          one server; rediss:// with TLS; redis:///run/redis.sock
    redis+sentinel://host1,host2/service/0       the primary that the sentinels name
    redis+cluster://host1:7000,host2:7000        a cluster; the records are spread over its nodes

Options, after `?`; all others are redis-py's own (`ssl_ca_certs=`, `client_name=`, ...), without its timeouts:

    prefix=oncemore      the first part of the names of all keys
    timeout=5s           the longest time that a call may take, with all attempts, before it fails
    poll=1s              how often a waiter looks by itself, in case that a wake-up message is lost
    wait_replicas=0      how many replicas must have a write before it counts (WAIT); `all` with sentinels or in a cluster
    tls=true             for redis+sentinel:// and redis+cluster://
    sentinel_username=, sentinel_password=       the login of the sentinels, if they have one of their own

A record is a msgpack array at `prefix:{digest}`.  Expired records that are kept for the audit move to
`prefix:{digest}:token`.  Running and held records never expire by themselves; settled and released ones do, in the server,
so that there is little to purge.  `list`, `purge` and `stats` scan the key space with SCAN: a record that is written
meanwhile may be missed, or listed twice.
"""

from .store import OPTIONS, RedisStore, connect, schema

__all__ = ["OPTIONS", "RedisStore", "connect", "schema"]
