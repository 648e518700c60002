"""The key-value store that the ranks share, whose requests end although rank 0, which hosts it, stands still."""

import queue
import threading
from concurrent.futures import Future
from datetime import timedelta
from typing import Any


class RankStore:
    """torch's TCPStore with a limit on every request; of torch's own, `check` and `add` wait for an answer for ever.

    A thread makes the requests, one after another. After one that was not answered in time, all raise at once until it
    is answered; only what `set` was given is kept, and stored then. All raise RuntimeError if the store is lost or does
    not answer.
    store: a connection used only here. seconds: the limit.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        store.set_timeout(timedelta(seconds=seconds))
        self._store, self._seconds = store, seconds
        self._requests: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._late: Future[Any] | None = None
        # Not an executor, for whose threads the interpreter waits when it exits.
        threading.Thread(target=self._work, name="rank store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> str:
        return self._ask("get", key).decode()

    def check(self, key: str) -> bool:
        """Whether the key has a value."""
        return self._ask("check", [key])

    def add(self, key: str, number: int) -> int:
        """Add to a number, which begins as 0; returns the sum."""
        return self._ask("add", key, number)

    def _ask(self, name: str, *arguments: Any) -> Any:
        answer = Future[Any]()
        is_late = self._late is not None and not self._late.done()
        if name == "set" or not is_late:
            self._requests.put((answer, name, arguments))
        try:
            return answer.result(0 if is_late else self._seconds)
        except TimeoutError:
            self._late = self._late if is_late else answer
            raise RuntimeError("rank 0 does not answer") from None

    def _work(self) -> None:
        while True:
            answer, name, arguments = self._requests.get()
            try:
                answer.set_result(getattr(self._store, name)(*arguments))
            except Exception as error:
                answer.set_exception(error)
