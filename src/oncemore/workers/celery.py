"""Celery tasks that run once; needs `pip install 'oncemore[celery]'`.

@app.task(acks_late=True, reject_on_worker_lost=True)
@once_task(guard, key="invoice:{invoice_id}")
def send_invoice(invoice_id): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from .._contract.policy import Policy
from .._ledger.connect import naming_extras
from .._ledger.guard import Guard, check_guard
from ..errors import ConfigurationError, OncemoreError
from .task import Key, RunningTask, WorkerTask, decorator

with naming_extras("oncemore.workers.celery"):
    from celery import Celery, Task, current_task  # type: ignore[import-untyped]
    from celery.exceptions import Reject, Retry, SoftTimeLimitExceeded  # type: ignore[import-untyped]

__all__ = ["OnceTask", "install", "once_task"]

P = ParamSpec("P")
T = TypeVar("T")


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator, to stand below `@app.task`: the task runs once per *key*, however often it is delivered.

    If another worker is running the task, it is sent again for later, and uses up no retry.  A soft time limit
    leaves the outcome in doubt: `on_unknown` decides, as after a crash.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the task's parameters (`"invoice:{invoice_id}"`), or a function of the same arguments.  By
            default the task's id, which stays the same in redeliveries and Celery's retries.
        name: The name of the operations, which is in their scope; by default the function's name.
        ignore: Parameters that may differ in a duplicate.  `self` of a bound task always may.
        settings: The settings of `Policy`, as for `once`.
    """
    return decorator(CeleryTask, guard, key, name, ignore, settings)


class CeleryTask(WorkerTask[P, T]):
    """A guarded function that Celery calls."""

    limits = (SoftTimeLimitExceeded,)
    contexts = (Task,)

    def __init__(
        self, guard: Guard, function: Callable[P, T], key: Key, name: str, ignore: Sequence[str], policy: Policy
    ) -> None:
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
        code = getattr(function, "__code__", None)
        if code is not None and code.co_varnames[: code.co_argcount][:1] == ("self",):  # bind=True: Celery's task
            ignore = tuple({*ignore, "self"})
        super().__init__(guard, function, key, name, ignore, policy)

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return Celery's current task, unless it was called like a function."""
        if not current_task or current_task.request.called_directly:
            return None
        return CurrentTask(current_task._get_current_object())


class CurrentTask(RunningTask):
    """The task that this Celery worker is running."""

    def __init__(self, task: Any) -> None:
        self.task = task
        self.request = task.request
        self.id = str(self.request.id)

    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Send the same task again with a countdown, as `Task.retry` does, but with the same number of retries."""
        if self.request.is_eager:  # there is no worker
            raise error
        again = self.task.signature_from_request(self.request, countdown=seconds, retries=self.request.retries)
        try:
            again.apply_async()
        except Exception as failure:  # the broker is down: have this message delivered again
            raise Reject(failure, requeue=True) from failure
        raise Retry(exc=error, when=seconds, sig=again)

    def hazards(self, policy: Policy) -> Iterator[str]:
        """Yield a warning if the task's acknowledgement or the broker's visibility timeout is unsafe."""
        if not self.task.acks_late:
            yield "acks_late is off, so Celery forgets the task when its worker is killed. Set acks_late=True"
        elif not self.task.reject_on_worker_lost:
            yield (
                "reject_on_worker_lost is off, so the task fails when its process is killed. "
                "Set reject_on_worker_lost=True; once_task prevents a second effect"
            )
        visible = (self.task.app.conf.broker_transport_options or {}).get("visibility_timeout")
        if visible is not None and visible < policy.lease:
            yield (
                f"visibility_timeout is {visible:g} s, shorter than the lease of {policy.lease:g} s: the broker delivers a "
                "killed task again before another worker may run it, and copies of it pile up. Set a shorter lease="
            )


class OnceTask(Task):  # type: ignore[misc]
    """A base class of Celery tasks that run once.  `install` makes it the base of all tasks of an app.

    `@app.task(once="invoice:{invoice_id}")` sets the key's template, `once={"key": ..., "ttl": "7d"}` also the
    settings, and `once=False` leaves a task unguarded.  By default the key is the task's id.
    """

    abstract = True
    acks_late = True
    reject_on_worker_lost = True
    once: str | Callable[..., str] | Mapping[str, Any] | bool = True
    once_guard: Guard | None = None
    once_settings: Mapping[str, Any] = {}

    @classmethod
    def on_bound(cls, app: Celery) -> None:
        """Guard the function inside `autoretry_for`, which would turn a time limit into a retry."""
        super().on_bound(app)
        function = cls.__dict__.get("run")
        inner = function.__func__ if isinstance(function, staticmethod) else function
        if inner is None or cls.once is False or hasattr(inner, "once_task"):
            return
        if cls.once_guard is None:
            raise ConfigurationError(f"{cls.name} has no guard: call install(app, guard) before its tasks are defined")
        own = cls.once
        settings = {**cls.once_settings, **(own if isinstance(own, Mapping) else {})}
        if not isinstance(own, Mapping) and own is not True:
            settings["key"] = own
        guarded = once_task(cls.once_guard, **settings)(inner)
        cls.run = staticmethod(guarded) if isinstance(function, staticmethod) else guarded


def install(app: Celery, guard: Guard, **settings: Any) -> None:
    """Make every task that *app* defines from now on an `OnceTask`, with these *settings* as its defaults."""
    attributes = {"abstract": True, "once_guard": check_guard(guard), "once_settings": settings}
    app.Task = type("OnceTask", (OnceTask, app.Task), attributes)
