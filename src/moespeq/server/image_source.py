"""Images that a client sends: as data URLs, or, where the server was told to, by an address it fetches them from.

Found wrong before the request queues, beside the event loop. Clients send a conversation's images again with each turn;
what a request may hold of them is bounded by the context, since each takes tokens of it, and by a number.
"""

from __future__ import annotations

import base64
import binascii
import threading
import weakref
from collections import deque
from collections.abc import Callable

from moespeq.config import format_bytes
from moespeq.decode.engine import Engine
from moespeq.errors import OverloadError, PromptError, UsageError
from moespeq.model.images import PreparedImage
from moespeq.server.failures import COME_BACK_S

__all__ = ["Fetch", "ImageMemory", "ImageSource"]

Fetch = Callable[[str], bytes]
"""The file at an http or https address. Raises UsageError."""

_MOST_IMAGES = 32  # each may take a second to decode
_SHOWN_CHARS = 40


class ImageMemory:
    """What the images of all requests that wait take of host memory, up to `most_bytes`. From any thread."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self._most_bytes, self._lock = most_bytes, threading.Lock()
        self._held_bytes = 0
        self._released: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        """By images that somebody holds now."""
        with self._lock:
            return self._count()

    def hold(self, image: PreparedImage) -> None:
        """Count it until nobody holds it any more. Raises OverloadError where too many are held."""
        num_bytes = image.num_bytes
        with self._lock:
            if self._count() + num_bytes > self._most_bytes:
                raise OverloadError(
                    f"The images of waiting requests take {format_bytes(self._held_bytes)}, and may take "
                    f"{format_bytes(self._most_bytes)}; try again later.",
                    retry_after_s=COME_BACK_S,
                )
            self._held_bytes += num_bytes
        # The deque needs no lock: a finalizer runs anywhere, inside of `hold` too.
        weakref.finalize(image, self._released.append, num_bytes)

    def _count(self) -> int:
        """With the lock."""
        while self._released:
            self._held_bytes -= self._released.popleft()
        return self._held_bytes


class ImageSource:
    """Of one request. fetch: None refuses addresses."""

    def __init__(self, engine: Engine, fetch: Fetch | None, memory: ImageMemory) -> None:
        self._engine, self._fetch, self._memory = engine, fetch, memory
        self._num_images = self._num_tok = 0

    def read(self, url: str) -> PreparedImage:
        """The next image of the request. Raises UsageError."""
        reader = self._engine.images
        self._num_images += 1
        if self._num_images > _MOST_IMAGES:
            raise PromptError(f"A request may hold {_MOST_IMAGES} images; send fewer.")
        image = reader.read(self._bytes(url), f"image {self._num_images}")
        self._memory.hold(image)
        self._num_tok += image.num_tok
        context_tok = self._engine.plan.context_tok
        if self._num_tok >= context_tok:
            raise PromptError(
                f"The first {self._num_images} images take {self._num_tok} tokens, and the context holds "
                f"{context_tok}; send fewer, or start the server with a larger --ctx-size."
            )
        return image

    def _bytes(self, url: str) -> bytes:
        scheme = url[:_SHOWN_CHARS].partition(":")[0].lower()
        if scheme == "data":
            return _decoded(url, self._num_images)
        if scheme not in ("http", "https"):
            raise UsageError(
                f"An image is a data URL (data:image/png;base64,...), got '{url[:_SHOWN_CHARS]}'; send one."
            )
        if self._fetch is None:
            raise UsageError(
                "Images at an address are not fetched here; send them as data URLs (data:image/png;base64,...), or "
                "start the server with --image-host."
            )
        return self._fetch(url)


def _decoded(url: str, number: int) -> bytes:
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise UsageError(f"The data URL of image {number} is not in base64; send it as data:image/png;base64,....")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"The data URL of image {number} is no valid base64 ({error}); correct it.") from None
