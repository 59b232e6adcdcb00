"""`moespeq prepare`: a checkpoint becomes a store."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moespeq.cli import options

if TYPE_CHECKING:
    from moespeq.nested import BaseFormat, Layout

__all__ = ["command"]


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint folder, or a hub id such as org/name.")],
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The new store; by default NAME.moespeq.")] = None,
    format: Annotated[  # noqa: A002 - the option's name
        str,
        typer.Option(
            "--format",
            metavar="auto|nested|code-width|plain",
            help="Layout of bf16 expert records; auto: code-width where a GPU encodes them, nested on a CPU.",
        ),
    ] = "auto",
    bits: Annotated[int | None, typer.Option("--bits", help="Bits of a base code: 4, 3 or 2; by default 4.")] = None,
    group: Annotated[int | None, typer.Option("--group", help="Weights that share a scale; by default 64.")] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="auto|cpu|cuda", help="Where experts are encoded; the bytes are the same."),
    ] = "auto",
    convert_to: options.ConvertTo = None,
    elsewhere: Annotated[
        list[Path] | None,
        typer.Option(
            "--elsewhere",
            metavar="DIR",
            help="A folder on another disk for a share of the expert records; may be given several times.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Turn a checkpoint into a store.

    Routed experts shrink by a fifth, and `moespeq export` gives the checkpoint back byte for byte, so the original may
    be deleted. Interrupted, it goes on when run again.

    Example: moespeq prepare allenai/OLMoE-1B-7B-0924 --out olmoe.moespeq
    """
    from moespeq.cli.console import note_new_folder, print_json, progress_bar, resumable, start_torch
    from moespeq.cli.console import out as console
    from moespeq.cli.refusals import refuse_at_once
    from moespeq.config import format_bytes

    refuse_at_once(model, {"device": device, "convert_to": convert_to})
    start_torch()
    from moespeq.prepare import not_kept, prepare_store, resolve_source

    layout, fmt = _formats(format, bits, group)
    if out is not None:
        note_new_folder(out)
    with progress_bar() as bar, resumable():
        store = prepare_store(
            model,
            out,
            layout=layout,
            fmt=fmt,
            device=device,
            convert_to="bf16" if convert_to else None,
            elsewhere=elsewhere or (),
            progress=bar,
        )
    left_out = not_kept(resolve_source(model))
    size_bytes = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    if json:
        facts = {"store": str(store), "size_bytes": size_bytes, **_formats_in(store)}
        print_json({**facts, "not_kept": list(left_out)})
    else:
        if layout is not None and layout.value not in (found := _formats_in(store)["format"]):
            console.print(f"--format is for bf16 experts; these are stored as they are: {found}")
        if left_out:
            console.print(f"Not kept, so keep them yourself: {', '.join(left_out)}")
        console.print(f"{store}: {format_bytes(size_bytes)}, ready for `moespeq run {quote(str(store))} -p ...`")


def _formats_in(store: Path) -> dict[str, Any]:
    """The layouts of a store's layers, of which most have one, and its base."""
    from moespeq.store.manifest import Manifest

    manifest = Manifest.load(store)
    layouts = ", ".join(sorted({layout.value for layout in manifest.layouts}))
    return {"format": layouts, "base": manifest.base_format.to_json()}


def _formats(name: str, bits: int | None, group: int | None) -> tuple[Layout | None, BaseFormat | None]:
    """Layout and base by name; None for auto, and where neither bits nor group are given. Raises UsageError."""
    from dataclasses import replace

    from moespeq.config import nearest_name
    from moespeq.errors import UsageError
    from moespeq.nested import DEFAULT_FORMAT, Layout

    known = ["auto", *(layout.value for layout in Layout if layout.is_bf16)]
    if name not in known:
        raise UsageError(f"Unknown format '{name}'; use {', '.join(known)}.{nearest_name(name, known)}")
    layout = None if name == "auto" else Layout(name)
    if bits is None and group is None:
        return layout, None
    bits = DEFAULT_FORMAT.bits if bits is None else bits
    return layout, replace(DEFAULT_FORMAT, bits=bits, group=DEFAULT_FORMAT.group if group is None else group)
