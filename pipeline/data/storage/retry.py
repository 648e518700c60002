"""Requests that fail: which are made again, for how long, and which no waiting mends."""

import random
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.errors import OneRankError
from pipeline.process import rank

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
# A storage that has not answered yet is named after so long. The client's own retries make one request take half a minute.
_SECONDS_TO_SAY = 2.0
# What pyarrow's messages say of errors that waiting does not mend -> what to tell, and the way out.
_HOPELESS = {
    r"NO_SUCH_BUCKET|bucket does not exist|^Bucket .* not found": "no such bucket. Check its name (and the endpoint)",
    r"INVALID_ACCESS_KEY|InvalidAccessKeyId|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN|UNRECOGNIZED_CLIENT|"
    r"ExpiredToken|EXPIRED_TOKEN|UNAUTHENTICATED|status 401|Could not create a OAuth2 access token": "there are no "
    "valid credentials. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for gs://, "
    "GOOGLE_APPLICATION_CREDENTIALS",
    r"ACCESS_DENIED|PERMISSION_DENIED|status 403": "access denied. Check that the credentials (AWS_PROFILE, or "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; GOOGLE_APPLICATION_CREDENTIALS for gs://) may list, read and, for a "
    "new data set, write there",
    r"status 30[127]|PERMANENT_REDIRECT|AuthorizationHeaderMalformed": "the bucket is in another region. Set "
    "AWS_REGION, or end the URL in ?region=...",
}


class StorageError(OneRankError):
    """A bucket that cannot be used: out of reach, or not for us. No fault of one file, so no budget covers it."""


@dataclass
class Retry:
    """How long a request is tried again, and how often that happened. Shared by all paths of a data set."""

    seconds: float = 600.0
    retries: int = 0
    has_answered: bool = field(default=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __reduce__(self) -> tuple:
        return Retry, (self.seconds,)

    def trying(self, path: object, action: Callable[[], T]) -> T:
        """action(), again and again while it fails for a passing reason.

        Raises StorageError when it is hopeless or has taken too long, FileNotFoundError for an object that is not there.
        """
        if self.has_answered:
            return self._trying(path, action)
        # Only before the first answer: later on a run has its own lines that count retries.
        notice = threading.Timer(_SECONDS_TO_SAY, self._say_waiting, [path])
        notice.daemon = True
        notice.start()
        try:
            return self._trying(path, action)
        finally:
            notice.cancel()

    def _say_waiting(self, path: object) -> None:
        if rank() == 0:
            print(
                f"waiting for {path}: no answer yet; its requests are repeated for at most {self.seconds / 60:.3g} minutes "
                "(data.retry_minutes)",
                file=sys.stderr,
                flush=True,
            )

    def _trying(self, path: object, action: Callable[[], T]) -> T:
        deadline, pause = 0.0, _FIRST_PAUSE
        while True:
            try:
                answer = action()
                self.has_answered = True
                return answer
            except FileNotFoundError:
                self.has_answered = True
                raise
            except StorageError:
                raise
            except OSError as error:
                reason = " ".join(str(error).split())
                for pattern, advice in _HOPELESS.items():
                    if re.search(pattern, reason):
                        raise StorageError(f"{path}: {advice}. ({_last(reason)})") from None
                now = time.monotonic()
                deadline = deadline or now + self.seconds
                if now >= deadline:
                    raise StorageError(
                        f"{path} is out of reach for {self.seconds / 60:.3g} minutes (data.retry_minutes): "
                        f"{_last(reason)}. Check the network and the endpoint; the same command goes on."
                    ) from None
            with self._lock:
                self.retries += 1
            # Random, so that a thousand ranks that met the same outage do not return at the same moment. It decides
            # nothing but the pause.
            time.sleep(min(pause * random.uniform(0.5, 1), max(deadline - now, 0)))
            pause = min(2 * pause, _LONGEST_PAUSE)


def _last(reason: str) -> str:
    """The end of pyarrow's message, which says what happened; the rest names the object again."""
    return reason.rpartition("AWS Error ")[2].rstrip(". ")
