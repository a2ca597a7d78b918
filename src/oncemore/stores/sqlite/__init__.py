"""A ledger in a SQLite file: the embedded default, for one machine and any number of its processes.

    sqlite:///once.db           a file, relative to the working folder at that time
    sqlite:////var/lib/once.db  a file by its whole path
    sqlite://                   in memory, for this store alone

Each commit is on the disk before anyone hears of it (WAL, `synchronous=FULL`); what callers ask for at the same time is
committed together.  The file must be on a local disk.  Options, as `?name=value`:

    create=true         make the tables on first use; with false they must exist: see `oncemore.stores.schema(url)`
    foreign_keys=false  with true, the foreign keys of your own tables are enforced in transactions: SQLite ignores them by itself
    prefix=oncemore_    what the names of the tables begin with
    synchronous=full    with `normal`, a power failure can lose the last commits: an operation may then run again
    thread=auto         event loops write by themselves while the disk is quick; with `always` a thread does it for them
    timeout=5s          how long to wait for the file while other processes write it
"""

from .store import OPTIONS, SqliteStore, connect, schema, url_of

__all__ = ["OPTIONS", "SqliteStore", "connect", "schema", "url_of"]
