"""Bytes of strangers become a picture or one sentence, and nothing large is decoded before its size is judged."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_families import pixels, png
from moespeq.errors import PromptError
from moespeq.model.image_file import MOST_IMAGE_BYTES, open_image, read_image_file


def _saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)  # type: ignore[arg-type]
    return file.getvalue()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _bomb(side: int) -> bytes:
    """A PNG of some hundred bytes that says it is `side` pixels wide and high."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", zlib.compress(bytes(1000))) + _chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF"])
def test_usual_formats_are_read_as_rgb(kind: str) -> None:
    original = pixels(1)
    lossless = {"lossless": True} if kind == "WEBP" else {}
    image = open_image(_saved(original, kind, **lossless))
    assert (image.mode, image.size) == ("RGB", original.size)
    if kind != "GIF":  # of 256 colours
        assert np.array_equal(np.asarray(image), np.asarray(original))


def test_a_camera_held_upright_gives_an_upright_picture() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert open_image(_saved(pixels(1, 40, 24), "JPEG", exif=exif)).size == (24, 40)


def test_transparent_and_palette_pictures_are_read() -> None:
    assert open_image(_saved(pixels(1).convert("RGBA"), "PNG")).mode == "RGB"
    assert open_image(_saved(pixels(1).convert("P"), "PNG")).mode == "RGB"


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "The cat is no PNG, JPEG, WEBP, GIF or BMP; send one."),
        (b"<svg></svg>", "The cat is no PNG, JPEG, WEBP, GIF or BMP; send one."),
        (_saved(pixels(1), "TIFF"), "The cat is no PNG, JPEG, WEBP, GIF or BMP; send one."),
        (png(1)[:300], "The cat is damaged and cannot be decoded; send it again."),
        (_saved(pixels(1), "JPEG")[:400], "The cat is damaged and cannot be decoded; send it again."),
        (_bomb(9_000), "The cat of 9000 x 9000 has more than the 64000000 pixels that are taken; scale it down."),
        (_bomb(100_000), "The cat has more than the 64000000 pixels that are taken; scale it down."),
        (_bomb(100), "The cat is damaged and cannot be decoded; send it again."),
    ],
)
def test_what_is_no_image_or_too_large_is_one_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(PromptError) as error:
        open_image(data, "cat")
    assert str(error.value) == sentence


def test_too_many_bytes_are_not_even_looked_at() -> None:
    with pytest.raises(PromptError, match=r"more than the 32.00 MiB that are taken; send a smaller one\.$"):
        open_image(png(1) + bytes(MOST_IMAGE_BYTES))


@pytest.mark.parametrize("spoil", [lambda data, at: data[:at], lambda data, at: data[:at] + b"\xff" + data[at + 1 :]])
def test_no_cut_or_changed_byte_escapes_as_another_error(spoil: Callable[[bytes, int], bytes]) -> None:
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = _saved(pixels(1), kind)
        for at in range(0, min(len(data), 1200), 5):
            try:
                open_image(spoil(data, at))
            except PromptError:
                continue


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"none\.png cannot be read \(No such file or directory\); give another"):
        read_image_file(tmp_path / "none.png")
    with pytest.raises(PromptError, match="cannot be read"):
        read_image_file(tmp_path)
