"""A checkpoint's own image processor, used without torchvision: what it makes of pictures, and of prompts with them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from families import tiny_config
from image_families import IMAGE_FAMILIES, make_reader, png
from moespeq.errors import CheckpointError, PromptError, UsageError
from moespeq.model.chat_prompt import chat_prompt
from moespeq.model.image_reader import ImageReader, why_no_images_in
from moespeq.model.images import ImagePrompt, PreparedImage
from moespeq.model.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reader("qwen3_vl_moe", tmp_path_factory.mktemp("reader") / "checkpoint")


def _reader(folder: Path, most_tok: int = 512) -> ImageReader:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    return ImageReader(AutoConfig.from_pretrained(folder), folder, tokenizer, most_tok)


def _asked(*images: PreparedImage, text: str = " and ") -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for image in images:
        parts += [{"type": "image", "image": image}, {"type": "text", "text": text}]
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]


def _prompt(reader: ImageReader, messages: Sequence[dict[str, Any]]) -> ImagePrompt:
    prompt = chat_prompt(reader.tokenizer, reader, messages)
    assert isinstance(prompt, ImagePrompt)
    return prompt


class _WithoutVideos(Qwen3VLProcessor):  # type: ignore[misc]
    """Which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return None


def test_tokens_and_pixels_are_those_of_the_familys_processor(folder: Path) -> None:
    reader = _reader(folder)
    files = [png(1), png(2, 50, 33)]
    images = [reader.read(file) for file in files]
    prompt = _prompt(reader, _asked(*images))
    processor = _WithoutVideos(reader._processor, AutoTokenizer.from_pretrained(folder), None)
    blank = [{**message, "content": _blank(message["content"])} for message in _asked(*images)]
    expected = processor(
        images=[Image.open(io.BytesIO(file)) for file in files],
        text=[reader.tokenizer.render_chat(blank)],
        return_tensors="pt",
        add_special_tokens=False,
    )
    assert list(prompt.tokens) == expected["input_ids"][0].tolist()
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.cat([image.inputs[name] for image in images]), expected[name])
    is_image = expected["mm_token_type_ids"][0].bool()
    rows = [row for placed in prompt.images for row in range(placed.begin, placed.end)]
    assert rows == is_image.nonzero()[:, 0].tolist()


def _blank(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "image"} if part["type"] == "image" else part for part in content]


def test_an_image_larger_than_one_may_be_is_scaled_down(folder: Path) -> None:
    assert _reader(folder).read(png(1, 300, 200)).num_tok > 100
    assert 10 < _reader(folder, most_tok=20).read(png(1, 300, 200)).num_tok <= 20


def test_equal_images_are_the_same_and_others_are_not(folder: Path) -> None:
    reader = _reader(folder)
    assert reader.read(png(1)).digest == reader.read(png(1)).digest != reader.read(png(2)).digest


@pytest.mark.parametrize(
    ("width", "height", "sentence"),
    [
        (1, 400, r"refuses the image of 1 x 400 \(absolute aspect ratio must be smaller than 200, got 400\.0\)"),
        (1600, 8, r"takes \d+ tokens, and one image may take 20; scale it down, or load with a larger context or"),
    ],
)
def test_a_shape_that_cannot_be_is_one_sentence(folder: Path, width: int, height: int, sentence: str) -> None:
    with pytest.raises(PromptError, match=sentence):
        _reader(folder, most_tok=20).read(png(1, width, height))


def test_a_place_for_an_image_in_the_text_itself_is_refused(folder: Path) -> None:
    reader = _reader(folder)
    with pytest.raises(PromptError, match=r"has 2 places for 1 images; leave '<\|image_pad\|>' out of what is written"):
        _prompt(reader, _asked(reader.read(png(1)), text="<|image_pad|>"))


def test_images_that_touch_are_refused(folder: Path) -> None:
    reader = _reader(folder)
    image = reader.read(png(1))
    with pytest.raises(PromptError, match=r"^Two images touch in this prompt; write something between them\.$"):
        reader.place("a <|image_pad|><|image_pad|> b", [image, image])
    assert len(reader.place("<|image_pad|> <|image_pad|>", [image, image]).images) == 2


def test_what_no_reader_made_is_no_image(folder: Path) -> None:
    reader = _reader(folder)
    messages = [{"role": "user", "content": [{"type": "image", "image": "cat.png"}]}]
    with pytest.raises(UsageError, match=r"^An image of a chat is what `engine\.images\.read` makes of a file"):
        chat_prompt(reader.tokenizer, reader, messages)


def test_parts_without_images_are_one_text(folder: Path) -> None:
    reader = _reader(folder)
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    joined = chat_prompt(reader.tokenizer, reader, [{"role": "user", "content": parts}])
    assert joined == reader.tokenizer.encode_chat([{"role": "user", "content": "one two"}])


def test_the_settings_of_a_processor_are_needed_and_checked(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied")
    settings = copied / "preprocessor_config.json"
    settings.write_text("{")
    with pytest.raises(CheckpointError, match=r"^The image processor in .* cannot be loaded: "):
        _reader(copied).read(png(1))
    settings.unlink()
    with pytest.raises(
        UsageError, match=r"takes no images: it comes without preprocessor_config\.json; leave them out"
    ):
        _reader(copied).read(png(1))


def test_settings_inside_of_the_processors_own_are_found(folder: Path, tmp_path: Path) -> None:
    """As transformers saves them today."""
    copied = shutil.copytree(folder, tmp_path / "copied")
    settings = json.loads((copied / "preprocessor_config.json").read_text())
    (copied / "preprocessor_config.json").unlink()
    (copied / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    assert _reader(copied).read(png(1)).digest == _reader(folder).read(png(1)).digest


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mixtral", "it has no part that sees"),
        ("gemma4", "it has no part that sees"),  # whose configuration may come without
        ("kimi_k25", "transformers reads images for it with torchvision only, and no test proves them yet"),
        ("glm4v_moe", "no test proves images of glm4v_moe yet"),
    ],
)
def test_other_models_say_why_they_take_none(family: str, reason: str, tmp_path: Path) -> None:
    assert why_no_images_in(tmp_path, tiny_config(family)) == reason


def test_a_rotation_that_depends_on_the_length_takes_none(tmp_path: Path) -> None:
    config = tiny_config("qwen3_vl_moe")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 64}
    config.text_config.rope_parameters = {**config.text_config.rope_parameters, **rope}
    assert why_no_images_in(tmp_path, config) == "its rotary embedding changes with the length of the text"


def test_every_family_with_images_has_a_tiny_one() -> None:
    from moespeq.model.families import VISION

    assert set(VISION) == set(IMAGE_FAMILIES)
