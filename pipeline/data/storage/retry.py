"""Which failed requests to an object store, and reads of a failing disk or file server, are retried, and for how
long.
"""

import itertools
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline.base.errors import Interrupted, OneRankError, is_outage
from pipeline.base.words import on_one_line
from pipeline.process.waits import waiting

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 30.0
# What pyarrow's messages of permanent errors contain -> the cause and the remedy.
_PERMANENT = {
    r"NO_SUCH_BUCKET|bucket does not exist|^Bucket .* not found": "no such bucket. Check its name (and the endpoint)",
    r"INVALID_ACCESS_KEY|InvalidAccessKeyId|SIGNATURE_DOES_NOT_MATCH|INVALID_CLIENT_TOKEN|UNRECOGNIZED_CLIENT|"
    r"ExpiredToken|EXPIRED_TOKEN|UNAUTHENTICATED|status 401|Could not create a OAuth2 access token": (
        "there are no "
        "valid credentials. Set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for gs://, "
        "GOOGLE_APPLICATION_CREDENTIALS"
    ),
    r"ACCESS_DENIED|PERMISSION_DENIED|status 403": (
        "access denied. Check that the credentials (AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY;"
        " GOOGLE_APPLICATION_CREDENTIALS for gs://) may list, read and, for a new data set, write there"
    ),
    r"status 30[127]|PERMANENT_REDIRECT|AuthorizationHeaderMalformed": (
        "the bucket is in another region. Set AWS_REGION, or end the URL in ?region=..."
    ),
    r"VALIDATION during|Invalid DNS Label": (
        "no valid URL can be made of the bucket's name and the endpoint. Check both "
        "(endpoint_override, AWS_ENDPOINT_URL)"
    ),
}


class StorageError(OneRankError):
    """A bucket cannot be reached or may not be used, or a file of a data set is missing or may not be read.

    Does not count as a bad sample.
    """


@dataclass
class Retry:
    """How long requests to an object store may take and are retried. Shared by all paths of a data set.

    seconds: how long a request is retried. setting: the setting that gave `seconds`, named in messages. stall_seconds:
    a connection that transfers nothing for so long is closed, and the request retried. retries: the number of retries
    so far.
    """

    seconds: float = 600.0
    setting: str = ""
    stall_seconds: float = 20.0
    retries: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _given_up: threading.Event = field(default_factory=threading.Event, repr=False)

    def __reduce__(self) -> tuple:
        return Retry, (self.seconds, self.setting, self.stall_seconds)

    def add(self, retries: int) -> None:
        """Count so many more retries."""
        with self._lock:
            self.retries += retries

    def give_up(self) -> None:
        """Make all threads that would retry, now or later, raise Interrupted instead: this process is about to end."""
        self._given_up.set()

    def _pause(self, failures: int, left: float) -> None:
        """Wait before another attempt, at most for the seconds that are left."""
        # Random, so that a thousand ranks that met the same outage do not return at the same moment. Nothing else
        # depends on this random number.
        pause = min(_FIRST_PAUSE * 2**failures, _LONGEST_PAUSE) * random.uniform(0.5, 1)
        if self._given_up.wait(max(min(pause, left), 0)):
            raise Interrupted

    def call(self, url: str, action: Callable[[], T], is_transfer: bool = False) -> T:
        """Returns action(), which is repeated while it fails for a passing reason. Announced as a wait
        (pipeline/process/waits.py).

        is_transfer: it takes long if all is well, as the upload of a shard does, and is mentioned once an attempt
        failed. Raises StorageError for a permanent failure and after `seconds`, and FileNotFoundError for a missing
        object.
        """
        store = "/".join(url.split("/", 3)[:3])
        with waiting(url, self.seconds, self.setting, store, is_silent=is_transfer) as wait:
            deadline = 0.0
            for failures in itertools.count():
                try:
                    return action()
                except (FileNotFoundError, StorageError):
                    raise
                except OSError as error:
                    reason = on_one_line(error)
                    # The end of pyarrow's message says what happened; the rest names the object again.
                    short = reason.rpartition("AWS Error ")[2].rstrip(". ")
                    for pattern, advice in _PERMANENT.items():
                        if re.search(pattern, reason):
                            raise StorageError(f"{url}: {advice}. ({short})") from None
                    now = time.monotonic()
                    if not deadline:
                        deadline, wait.is_silent = now + self.seconds, False
                    if now >= deadline:
                        limit = f"{self.seconds / 60:.3g} minutes" + (f" ({self.setting})" if self.setting else "")
                        raise StorageError(
                            f"{url} was unreachable for {limit}: {short}. Check the network, the endpoint and, if one"
                            " is set, the proxy (https_proxy, no_proxy); the same command continues."
                        ) from None
                self.add(1)
                self._pause(failures, deadline - now)
            raise AssertionError

    def read_file(self, path: str, action: Callable[[], T]) -> T:
        """Returns action(), which reads a local file, and is repeated while the disk or the file server fails.

        Raises what it raises: an outage (`is_outage`) after `seconds`, anything else at once.
        """
        try:
            return action()
        except OSError as error:
            if not is_outage(error):
                raise
        with waiting(path, self.seconds, self.setting) as wait:
            for failures in itertools.count():
                self.add(1)
                self._pause(failures, wait.left)
                try:
                    return action()
                except OSError as error:
                    if not is_outage(error) or wait.left <= 0:
                        raise
        raise AssertionError
