"""What can be refused of a request before torch is imported, which takes seconds, and before a model is downloaded,
prepared or loaded for it, which may take minutes.

Decides nothing of its own: it asks those who would refuse later, with what is there by then.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["refuse_at_once", "refuse_early"]


def refuse_at_once(model: str | None, loading: Mapping[str, Any]) -> None:
    """Raise what the model's name and these options tell without torch. Raises MoespeqError."""
    from moespeq.config import LoadOptions
    from moespeq.model_place import local_folder

    LoadOptions.from_mapping(loading)
    if model is not None:
        local_folder(model)


def refuse_early(
    model: str,
    loading: Mapping[str, Any],
    sampling: Mapping[str, Any],
    *,
    chat: str | None,
    images: Sequence[tuple[str, bytes]] = (),
) -> None:
    """Raise what loading `model` with these options, or asking it like this, would raise. Raises MoespeqError.

    chat: where the model's chat template is needed, the system message, "" for none; images: files, behind
    what a person calls them.
    """
    from moespeq.config import LoadOptions
    from moespeq.decode.params import SamplingParams
    from moespeq.errors import UsageError
    from moespeq.model.loading import load_config, load_generation_config
    from moespeq.model.tokenizer import Tokenizer, check_utf8
    from moespeq.prepare import resolve_small_files
    from moespeq.profiling import choose_device

    LoadOptions.from_mapping({**loading, "device": choose_device(loading["device"])})
    folder = resolve_small_files(model)
    config = load_config(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the request itself warns again
        defaults = load_generation_config(folder, config)
        SamplingParams.from_generation_config(defaults, **sampling)
    if images:
        from moespeq.model.image_file import open_image
        from moespeq.model.image_reader import check_takes_images

        check_takes_images(folder, config)
        for what, data in images:
            open_image(data, what)
    if chat is not None:
        tokenizer = Tokenizer.load(folder)
        if tokenizer is None:
            raise UsageError("This checkpoint has no tokenizer, which a chat needs; use one that has.")
        check_utf8("system message", chat)
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
