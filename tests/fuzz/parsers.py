"""A coverage-guided fuzzer for everything that is parsed without trust: headers, indexes, manifests, tables.

    python tests/fuzz/parsers.py TARGET -runs=1000000 [more options of libFuzzer]

A case passes when it is accepted or refused with a MoespeqError of one short, printable sentence. It fails for any
other exception, for a file opened outside the case's own folder, for an accepted tensor or record that leaves its file,
after 10 s, and beyond 2 GiB. What a manifest says is signed anew in every case, as by whoever writes one by hand.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["moespeq.store", "moespeq.nested.format"]):
    from moespeq.store import SafetensorsFile, Store, open_checkpoint
    from moespeq.store.manifest import digest_of
    from moespeq.store.untrusted import parse_json

sys.path.insert(0, str(Path(__file__).parents[1]))
import synthetic_store
from moespeq.errors import MoespeqError

SHARDS = ("model-1.safetensors", "model-2.safetensors")
WORDS = (
    *("weight_map", "dtype", "shape", "data_offsets", "__metadata__", "U8", "BF16", "F4", "F6_E2M3", "\\\\ud800", ".."),
    *("num_experts", "layouts", "plain", "code-width", "matrices", "files", "path", "experts_file_bytes", "dense/"),
    *("[[[[[[[[", "{}", "null", "true", "NaN", "-1", "1e9", "0.0", "9223372036854775807", "18446744073709551616"),
)
LIMITS = ("-timeout=10", "-len_control=0", "-rss_limit_mb=2048", "-max_len=4096", "-print_final_stats=1")


class Watch:
    """Notes every file that is opened outside `folder` while a case runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_on = str(folder.resolve()), False
        self.outside: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._is_on and event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            place = os.path.realpath(os.fsdecode(arguments[0]))
            if not place.startswith(self._folder):
                self.outside.append(place)

    def run(self, case: Callable[[], None]) -> None:
        self._is_on = True
        try:
            case()
        except MoespeqError as error:
            sentence = str(error)
            assert sentence.isprintable(), sentence
            assert len(sentence) < 1000, sentence
        finally:
            self._is_on = False
        assert not self.outside, self.outside


class Header:
    """The bytes are a whole safetensors file; those that begin with a brace are its JSON, a line break and its data."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "case.safetensors"

    def seeds(self) -> list[bytes]:
        tensors = {"a": ("BF16", [2, 3], bytes(12)), "b": ("U8", [1], b"x"), "none": ("F32", [0, 7], b"")}
        whole = synthetic_store.write_safetensors(self._path, tensors).read_bytes()
        text_bytes = int.from_bytes(whole[:8], "little")
        return [whole, whole[8 : 8 + text_bytes] + b"\n" + whole[8 + text_bytes :]]

    def __call__(self, data: bytes) -> None:
        if data.startswith(b"{"):
            text, _, rest = data.partition(b"\n")
            data = struct.pack("<Q", len(text)) + text + rest
        self._path.write_bytes(data)
        file = SafetensorsFile.open(self._path)
        for entry in file.entries:
            assert len(file.header) <= entry.offset <= entry.offset + entry.num_bytes <= len(data), entry
            assert file.read(entry.offset, entry.num_bytes).tobytes() == data[entry.offset :][: entry.num_bytes]


class Index:
    """The bytes are the index of a checkpoint of two shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        synthetic_store.write_safetensors(folder / SHARDS[0], {"a": ("U8", [3], b"abc")})
        synthetic_store.write_safetensors(folder / SHARDS[1], {"b": ("U8", [1], b"d")})

    def seeds(self) -> list[bytes]:
        names = [*SHARDS, "../x.safetensors", "/etc/passwd.safetensors", "a\0.safetensors"]
        return [json.dumps({"weight_map": {"a": name, "b": SHARDS[1]}}).encode() for name in names]

    def __call__(self, data: bytes) -> None:
        (self._folder / "model.safetensors.index.json").write_bytes(data)
        checkpoint = open_checkpoint(self._folder)
        assert set(checkpoint.tensors) <= {"a", "b"}


class Manifests:
    """The bytes are what a manifest says, signed here; a store of two layers lies beside it."""

    def __init__(self, folder: Path) -> None:
        self._store = synthetic_store.build(folder / "store")
        self._honest = (self._store / "manifest.json").read_bytes()

    def seeds(self) -> list[bytes]:
        return [self._honest]

    def __call__(self, data: bytes) -> None:
        try:
            values = parse_json(data)
            values.pop("digest", None)
            data = json.dumps({**values, "digest": digest_of(values)}).encode()
        except (ValueError, AttributeError, TypeError, RecursionError):
            pass  # no object: as it is
        (self._store / "manifest.json").write_bytes(data)
        read_all(self._store)


class Tables:
    """The bytes are XORed over the record table, then over the table of pieces; the manifest agrees with the result."""

    def __init__(self, folder: Path) -> None:
        self._store = synthetic_store.build(folder / "store")
        synthetic_store.add_source_header(self._store)
        self._values = json.loads((self._store / "manifest.json").read_text())
        self._honest = {name: (self._store / f"{name}.bin").read_bytes() for name in ("records", "pieces")}

    def seeds(self) -> list[bytes]:
        return [b"\0", b"\0" * sum(map(len, self._honest.values()))]

    def __call__(self, data: bytes) -> None:
        values = {name: value for name, value in self._values.items() if name != "digest"}
        for name, honest in self._honest.items():
            mask, data = data[: len(honest)], data[len(honest) :]
            table = bytes(a ^ b for a, b in zip(honest, mask.ljust(len(honest), b"\0"), strict=True))
            (self._store / f"{name}.bin").write_bytes(table)
            values[name] = {"size_bytes": len(table), "crc32": zlib.crc32(table)}
        (self._store / "manifest.json").write_text(json.dumps({**values, "digest": digest_of(values)}))
        read_all(self._store)


class Each:
    """The first byte says which of the others reads the rest: for a short run of all, whose start takes longer."""

    def __init__(self, folder: Path) -> None:
        self._targets = []
        for kind in (Header, Index, Manifests, Tables):
            place = folder / kind.__name__
            place.mkdir()
            self._targets.append(kind(place))

    def seeds(self) -> list[bytes]:
        return [bytes([i]) + seed for i, target in enumerate(self._targets) for seed in target.seeds()]

    def __call__(self, data: bytes) -> None:
        if data:
            self._targets[data[0] % len(self._targets)](data[1:])


def read_all(path: Path) -> None:
    """Everything that a store promises."""
    with Store.open(path) as store:
        for key in store.keys():  # noqa: SIM118
            store.read_base_into(key, memoryview(bytearray(store.base_bytes(key))), verify=True)
            store.read_record_into(key, memoryview(bytearray(store.record_bytes(key))), verify=True)
        assert all(len(data) == entry.num_bytes for entry, data in store.dense_tensors())
        shapes = {name: (rows, cols) for name, rows, cols in store.manifest.matrices}
        for piece in store.pieces():
            assert piece.row_start + piece.num_rows <= shapes[piece.matrix][0], piece


TARGETS = {"header": Header, "index": Index, "manifest": Manifests, "tables": Tables, "each": Each}


def main(name: str, options: list[str]) -> None:
    """Fuzz one target; libFuzzer ends the process, with 0 when all cases passed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        corpus, place = Path(folder) / "corpus", Path(folder) / "case"
        words = Path(folder) / "words"
        words.write_text("".join(f'"{word}"\n' for word in WORDS))
        corpus.mkdir()
        place.mkdir()
        target, watch = TARGETS[name](place), Watch(place)
        for i, seed in enumerate(target.seeds()):
            (corpus / str(i)).write_bytes(seed)
        artifacts = f"-artifact_prefix={Path(tempfile.gettempdir())}/fuzz-{name}-"
        arguments = [sys.argv[0], *LIMITS, f"-dict={words}", artifacts, *options, str(corpus)]
        atheris.Setup(arguments, lambda data: watch.run(lambda: target(data)))
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
