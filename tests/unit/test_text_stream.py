"""Streamed text equals decoding all tokens at once, however tokens arrive, and ends before the first stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from moespeq.decode.text import StreamDelta, TextStream

MODEST = settings(max_examples=120, deadline=None, derandomize=True)
TEXTS = st.text(st.sampled_from("ab \n.'é∀日😀👩‍👩‍👧🇫🇷\u0301\ufffd"), max_size=24)
KINDS = ("byte-level", "byte-fallback")


@cache
def tokenizer(kind: str) -> Tokenizer:
    return {"byte-level": byte_level, "byte-fallback": byte_fallback}[kind]()


def byte_level() -> Tokenizer:
    """As GPT-2's: every token is a run of bytes, so a character may be spread over tokens."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    built.train_from_iterator(["a ab abba the end. 😀😀 😁 日本 日光"] * 4, trainer)
    return built


def byte_fallback() -> Tokenizer:
    """As Llama's: a mark begins a word, a text's first space is stripped, other characters are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", ".", "▁a", "▁b", "ab"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    built.decoder = decoders.Sequence(steps)
    built.add_special_tokens([AddedToken("<eos>", special=True)])
    return built


def in_chunks(tokens: Sequence[int], cuts: Sequence[int]) -> list[list[int]]:
    edges = [0, *sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
    return [list(tokens[a:b]) for a, b in pairwise(edges)]


def stream(decoder: Tokenizer, chunks: Sequence[Sequence[int]], stop: tuple[str, ...] = ()) -> tuple[list[str], int]:
    """The pieces handed out, and how many tokens were taken."""
    text, pieces, num_tokens = TextStream(decoder, stop), [], 0
    for chunk in chunks:
        delta = text.push(chunk)
        pieces.append(delta.text)
        num_tokens += delta.num_tokens
        if delta.stopped:
            break
    return [*pieces, text.flush()], num_tokens


@pytest.mark.parametrize("kind", KINDS)
@MODEST
@given(TEXTS, st.lists(st.integers(0, 60), max_size=8))
def test_pieces_join_to_the_decoded_text_for_every_split(kind, text, cuts):
    tokens = tokenizer(kind).encode(text).ids
    pieces, num_tokens = stream(tokenizer(kind), in_chunks(tokens, cuts))
    assert "".join(pieces) == tokenizer(kind).decode(tokens)
    assert num_tokens == len(tokens)


@MODEST
@given(st.lists(st.integers(0, 289), max_size=30), st.lists(st.integers(0, 30), max_size=8))
def test_pieces_of_arbitrary_bytes_join_to_the_decoded_text(tokens, cuts):
    pieces, _ = stream(tokenizer("byte-level"), in_chunks(tokens, cuts))
    assert "".join(pieces) == tokenizer("byte-level").decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
@MODEST
@given(TEXTS.map(lambda text: text.replace("\ufffd", "")))
def test_every_prefix_handed_out_is_a_prefix_of_the_final_text(kind, text):
    """So a replacement character that resolves later is never shown."""
    tokens = tokenizer(kind).encode(text).ids
    running, final = TextStream(tokenizer(kind)), tokenizer(kind).decode(tokens)
    shown = ""
    for token in tokens:
        shown += running.push([token]).text
        assert final.startswith(shown)


@pytest.mark.parametrize("kind", KINDS)
@MODEST
@given(
    TEXTS,
    st.lists(st.text(st.sampled_from("ab .😀"), min_size=1, max_size=3), min_size=1, max_size=3),
    st.lists(st.integers(0, 60), max_size=8),
)
def test_text_ends_before_the_stop_that_is_complete_first(kind, text, stop, cuts):
    tokens = tokenizer(kind).encode(text).ids
    whole = tokenizer(kind).decode(tokens)
    pieces, num_tokens = stream(tokenizer(kind), in_chunks(tokens, cuts), tuple(stop))
    found = [(whole.find(one) + len(one), whole.find(one)) for one in stop if one in whole]
    assert "".join(pieces) == (whole[: min(found)[1]] if found else whole)
    if found:  # the last token taken is the one that completed the stop
        assert len(tokenizer(kind).decode(tokens[:num_tokens]).rstrip("\ufffd")) >= min(found)[0]
        assert len(tokenizer(kind).decode(tokens[: num_tokens - 1]).rstrip("\ufffd")) < min(found)[0]


class Letters:
    """A tokenizer whose token t reads WORDS[t]."""

    WORDS = ("x", "<", "|end", "|>", "STOP", "ST", "OP", "OPS and more", "aSTOPb", "</th", "ink>")

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        return "".join(self.WORDS[token] for token in ids)


def push_words(*words: str, stop: tuple[str, ...]) -> StreamDelta:
    return TextStream(Letters(), stop).push([Letters.WORDS.index(word) for word in words])


def test_tokens_behind_a_stop_that_spans_tokens_are_not_taken():
    assert push_words("x", "<", "|end", "|>", "x", stop=("<|end|>",)) == StreamDelta("x", 4, True)


def test_a_stop_inside_one_token_cuts_the_token():
    assert push_words("x", "aSTOPb", "x", stop=("STOP",)) == StreamDelta("xa", 2, True)


def test_a_stop_that_ends_inside_a_token_hides_the_rest_of_it():
    assert push_words("ST", "OPS and more", stop=("STOP",)) == StreamDelta("", 2, True)


def test_the_stop_that_is_complete_first_wins_as_if_characters_arrived_one_by_one():
    assert push_words("aSTOPb", stop=("STOPb", "TO")) == StreamDelta("aS", 1, True)


def test_a_partial_stop_is_held_and_given_when_it_fails_to_complete():
    text = TextStream(Letters(), ("<|end|>",))
    assert text.push([1]) == StreamDelta("", 1, False)
    assert text.push([2]) == StreamDelta("", 1, False)
    assert text.push([0]) == StreamDelta("<|endx", 1, False)


def test_a_partial_stop_at_the_end_is_given_by_flush():
    text = TextStream(Letters(), ("</think>",))
    assert text.push([0, 9]) == StreamDelta("x", 2, False)
    assert text.flush() == "</th"
    assert not text.stopped


def test_nothing_follows_a_stop():
    text = TextStream(Letters(), ("STOP",))
    text.push([4])
    assert text.stopped
    assert text.flush() == ""
    with pytest.raises(AssertionError, match="never live"):
        text.push([0])


def test_an_overlapping_beginning_of_a_stop_is_found():
    class Chars:
        def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
            return "".join(map(chr, ids))

    assert TextStream(Chars(), ("aab",)).push(list(b"caaab")) == StreamDelta("ca", 5, True)


def test_unfinished_bytes_wait_for_the_flush():
    tokens = tokenizer("byte-level").encode("é日").ids[:-1]
    text = TextStream(tokenizer("byte-level"))
    shown = text.push(tokens).text
    assert shown == "é"
    assert shown + text.flush() == tokenizer("byte-level").decode(tokens) == "é\ufffd"
    assert text.flush() == ""


def test_byte_fallback_keeps_a_whole_character_before_an_unfinished_one():
    tokens = tokenizer("byte-fallback").encode("😀😀").ids
    text = TextStream(tokenizer("byte-fallback"))
    assert text.push(tokens[:-1]).text.strip() == "😀"
    assert text.flush() == "\ufffd" * 3


def test_special_tokens_are_skipped_or_shown():
    built = tokenizer("byte-level")
    tokens = [*built.encode("ab").ids, built.token_to_id("<eos>")]
    assert TextStream(built).push(tokens).text == "ab"
    assert TextStream(built, skip_special_tokens=False).push(tokens).text == "ab<eos>"
