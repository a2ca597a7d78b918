"""Dramatiq actors that run once; needs `pip install 'oncemore[dramatiq]'`.

broker.add_middleware(OnceMiddleware(guard))

@dramatiq.actor
@once_task(guard, key="invoice:{invoice_id}")
def send_invoice(invoice_id): ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from .._ledger.connect import naming_extras
from .._ledger.guard import Guard, check_guard
from ..errors import OncemoreError
from .task import Key, RunningTask, WorkerTask, decorator

with naming_extras("oncemore.workers.dramatiq"):
    from dramatiq import Actor, Broker, Message
    from dramatiq.errors import Retry
    from dramatiq.middleware import CurrentMessage

__all__ = ["OnceMiddleware", "once_task"]

P = ParamSpec("P")
T = TypeVar("T")


def once_task(
    guard: Guard, *, key: Key = None, name: str = "", ignore: Sequence[str] = (), **settings: Any
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator, to put below `@dramatiq.actor`: the actor runs once per *key*, however often delivered.

    The broker needs `OnceMiddleware` or Dramatiq's `CurrentMessage`.  If another worker is processing the message, it
    is sent again for later, and uses up no retry.  A time limit or a shutdown leaves the outcome in doubt: `on_unknown`
    decides, as after a crash.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the actor's parameters (`"invoice:{invoice_id}"`), or a function of the same arguments.  By
            default the message's id, which stays the same in redeliveries and retries.
        name: The name of the operations, which is in their scope; by default the function's name.
        ignore: Parameters that may differ in a duplicate.
        settings: The settings of `Policy`, as for `once`.
    """
    return decorator(DramatiqTask, guard, key, name, ignore, settings)


class DramatiqTask(WorkerTask[P, T]):
    """A guarded function that Dramatiq calls.  Its time limits are no Exceptions, so the outcome is in doubt anyway."""

    how_to_name = "add OnceMiddleware(guard) to the broker"

    def running_task(self, args: Sequence[Any], kwargs: dict[str, Any]) -> RunningTask | None:
        """Return the message that this thread is processing."""
        message = CurrentMessage.get_current_message()
        return None if message is None else ProcessedMessage(message)


class ProcessedMessage(RunningTask):
    """The message that a worker thread is processing."""

    def __init__(self, message: Message[Any]) -> None:
        self.message = message
        self.id = str(message.message_id)

    def later(self, seconds: float, error: OncemoreError) -> Any:
        """Ask for a retry after a delay.  Subtract one from the retries, because the Retries middleware adds one."""
        self.message.options["retries"] = self.message.options.get("retries", 0) - 1
        raise Retry(error.detail, delay=round(seconds * 1000)) from error


class OnceMiddleware(CurrentMessage):
    """Middleware for a broker: gives `once_task` the message, and guards actors that have the option `once`.

    `@dramatiq.actor(once="invoice:{invoice_id}")` sets the key's template; with `once=True` the key is the message's
    id.  *settings* are those of `once_task`, for all these actors.  Add the middleware before the actors are declared.
    """

    def __init__(self, guard: Guard, **settings: Any) -> None:
        super().__init__()
        self.guard = check_guard(guard)
        self.settings = settings

    @property
    def actor_options(self) -> set[str]:
        return {"once"}

    def before_declare_actor(self, broker: Broker, actor: Actor[Any, Any]) -> None:
        """Guard the actor's function."""
        once = actor.options.get("once")
        if once and not hasattr(actor.fn, "once_task"):
            key = None if once is True else once
            actor.fn = once_task(self.guard, key=key, **self.settings)(actor.fn)
