"""From the bytes of a file to a picture, whoever sent them: what is none, or would fill the memory, is refused.

Sizes are read from the header and judged before anything is decoded; formats are a closed list, since a decoder that
nobody asked for is a door. Of an animation the first picture counts; a camera's note which way is up is followed.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from moespeq.config import format_bytes
from moespeq.errors import PromptError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MOST_IMAGE_BYTES", "open_image", "read_image_file"]

MOST_IMAGE_BYTES = 32 << 20
_MOST_PIXELS = 64_000_000  # a picture of 192 MB while it is decoded
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def read_image_file(path: str | Path) -> bytes:
    """The bytes of a file. Raises PromptError where it cannot be read, or is too long to be one image."""
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(MOST_IMAGE_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # of the disk, of a NUL in the name, of an unknown ~user
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise PromptError(f"The image {path} cannot be read ({reason}); give another file.") from error
    return data


def open_image(data: bytes, what: str = "image") -> Image:
    """The picture in `data`, RGB. `what` is what a person calls it. Raises PromptError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if len(data) > MOST_IMAGE_BYTES:
        raise PromptError(
            f"The {what} has more than the {format_bytes(MOST_IMAGE_BYTES)} that are taken; send a smaller one."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we judge the size
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            _check_size(image.width, image.height, what)
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise PromptError(f"The {what} is no {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}; send one.") from error
    except Image.DecompressionBombError as error:
        raise PromptError(f"The {what} {_TOO_LARGE}") from error
    except PromptError:
        raise
    except Exception as error:  # A decoder raises whatever breaks first in a file that is cut, or was never whole.
        raise PromptError(f"The {what} is damaged and cannot be decoded; send it again.") from error


_TOO_LARGE = f"has more than the {_MOST_PIXELS} pixels that are taken; scale it down."


def _check_size(width: int, height: int, what: str) -> None:
    if width * height > _MOST_PIXELS:
        raise PromptError(f"The {what} of {width} x {height} {_TOO_LARGE}")
