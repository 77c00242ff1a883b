"""The text law: valid UTF-8, never taken back, independent of the split into tokens, held back only as stated."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.stop_strings import StopAutomaton
from service.text import OutputText, decode_tokens
from tests.service.text_tables import split, table_of

LANGUAGES = {
    "Arabic": "مرحبا بالعالم، كيف حالك؟", "Bengali": "ওহে বিশ্ব, কেমন আছো?", "Chinese": "你好，世界！今天天气怎么样？",
    "English": "Hello, world! How are you?", "French": "Où est passé le garçon à l'œil bleu ?",
    "German": "Grüße aus Köln, schöne Straße!", "Greek": "Γειά σου Κόσμε, τι κάνεις;",
    "Hebrew": "שלום עולם, מה שלומך?", "Hindi": "नमस्ते दुनिया, आप कैसे हैं?", "Japanese": "こんにちは世界、元気ですか？",
    "Korean": "안녕하세요 세계, 잘 지내세요?", "Russian": "Привет, мир! Как дела?",
    "emoji": "👩‍👩‍👧‍👦 🇩🇪 🏳️‍🌈 👍🏽 😀 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
}
texts = st.text(st.one_of(st.sampled_from("abcé你😀"), st.characters(exclude_categories=["Cs"])), max_size=40)
cut_lists = st.lists(st.integers(0, 400), max_size=30)
stop_lists = st.lists(st.text(st.sampled_from("abcé你😀"), min_size=1, max_size=4), max_size=5)


def run(
    tokens: Sequence[bytes], stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0,
) -> tuple[list[str], OutputText]:
    """The deltas of an output that samples exactly these tokens."""
    output = OutputText(
        table_of(tokens), StopAutomaton(stops), include_stop=include_stop, min_tokens=min_tokens,
    )
    deltas = [output.push(token_id) for token_id in range(len(tokens))]
    return [*deltas, output.settle()], output


def cut_at_first_stop(text: str, stops: Sequence[str], *, include_stop: bool) -> tuple[str, str | None]:
    """The plain definition: the stop that ends first, the longest of those that end together."""
    for end in range(1, len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            stop = max(matching, key=len)
            return (text[:end] if include_stop else text[: end - len(stop)]), stop
    return text, None


@pytest.mark.parametrize("name", LANGUAGES)
def test_every_language_survives_being_split_at_every_byte(name: str) -> None:
    text = LANGUAGES[name]
    raw = text.encode()
    for size in (1, 2, 3, 5, len(raw)):
        deltas, _ = run([raw[i : i + size] for i in range(0, len(raw), size)])
        assert "".join(deltas) == text


@given(texts, cut_lists, stop_lists, st.booleans())
def test_any_split_gives_the_same_text_and_the_same_stop(
    text: str, cuts: list[int], stops: list[str], include_stop: bool
) -> None:
    deltas, output = run(split(text.encode(), cuts), stops, include_stop=include_stop)
    assert ("".join(deltas), output.stop_text) == cut_at_first_stop(text, stops, include_stop=include_stop)


@given(st.binary(max_size=60), cut_lists, st.booleans())
def test_invalid_bytes_become_replacement_characters_as_in_a_whole_decode(
    raw: bytes, cuts: list[int], per_byte: bool
) -> None:
    table = table_of(split(raw, cuts), per_byte=per_byte)
    ids = range(len(table.pieces))
    output = OutputText(table)
    shown = "".join(output.push(i) for i in ids) + output.settle()
    assert shown == decode_tokens(table, ids, skip_special_tokens=True)
    if not per_byte:
        assert shown == raw.decode("utf-8", "replace")


@given(texts, cut_lists, stop_lists)
def test_only_an_unfinished_character_and_a_possible_stop_are_held_back(
    text: str, cuts: list[int], stops: list[str]
) -> None:
    tokens = split(text.encode(), cuts)
    output = OutputText(table_of(tokens), StopAutomaton(stops))
    shown, raw = "", b""
    for token_id, piece in enumerate(tokens):
        shown += output.push(token_id)
        raw += piece
        if output.stop_text is not None:
            return
        whole = raw.decode("utf-8", "ignore")
        assert whole.startswith(shown)
        held = whole[len(shown) :]
        possible = [stop[:k] for stop in stops for k in range(1, len(stop)) if whole.endswith(stop[:k])]
        assert held == max(possible, key=len, default="")


@given(texts, cut_lists, stop_lists, st.booleans())
def test_visible_tokens_are_the_leading_ones_that_gave_at_least_a_byte(
    text: str, cuts: list[int], stops: list[str], include_stop: bool
) -> None:
    tokens = split(text.encode(), cuts)
    deltas, output = run(tokens, stops, include_stop=include_stop)
    shown_bytes = len("".join(deltas).encode())
    starts = [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    assert output.visible_token_count == sum(start < shown_bytes for start in starts)


def test_the_stop_counts_up_to_the_token_that_completes_it_and_ignores_the_rest() -> None:
    deltas, output = run([b"one", b" EN", b"D tail", b" more"], ["END"])
    assert "".join(deltas) == "one "
    assert (output.token_count, output.visible_token_count, output.stop_text) == (3, 2, "END")


def test_a_stop_before_min_tokens_is_text_like_any_other() -> None:
    deltas, output = run([b"END", b" x", b" END", b" tail"], ["END"], min_tokens=3)
    assert "".join(deltas) == "END x "
    assert output.token_count == 3


def test_a_stop_token_is_text_only_when_asked_for_even_a_special_one() -> None:
    table = table_of([b"hello", b"<end>"], special=[1])
    for include, expected, visible in ((False, "hello", 1), (True, "hello<end>", 2)):
        output = OutputText(table, include_stop=include)
        text = output.push(0) + output.push_stop_token(1) + output.settle()
        assert (text, output.token_count, output.visible_token_count) == (expected, 2, visible)


def test_special_tokens_are_left_out_by_default() -> None:
    table = table_of([b"a", b"<s>", b"b"], special=[1])
    for skip, expected in ((True, "ab"), (False, "a<s>b")):
        output = OutputText(table, skip_special_tokens=skip)
        assert "".join(output.push(i) for i in range(3)) + output.settle() == expected
        assert output.visible_token_count == 3


def test_a_half_character_at_the_end_is_one_replacement_character() -> None:
    deltas, output = run(["ab😀".encode()[:-1]])
    assert deltas == ["ab", "\ufffd"]
    assert output.visible_token_count == 1


@pytest.mark.parametrize("include", [False, True])
def test_a_half_character_at_the_end_may_complete_a_stop_string(include: bool) -> None:
    deltas, output = run(["ab 😀".encode()[:-1]], [" \ufffd"], include_stop=include)
    assert "".join(deltas) == ("ab \ufffd" if include else "ab")
    assert (output.stop_text, output.token_count) == (" \ufffd", 1)


def test_what_a_stop_string_held_back_is_shown_at_the_end() -> None:
    deltas, output = run(["one EN😀".encode()[:-1]], ["EN\ufffdD"])
    assert "".join(deltas) == "one EN\ufffd"
    assert output.stop_text is None


def test_the_longest_possible_stop_list_stays_fast() -> None:
    stops = ["a" * k + "b" for k in range(240, 256)]
    deltas, output = run([b"a" * 1000] * 20, stops)
    assert "".join(deltas) == "a" * 20_000
    assert output.stop_text is None
