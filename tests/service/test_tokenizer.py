"""Tokenizers: ids to bytes and back as the tokenizers library does it; chat templates; what is refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from engine.errors import InvalidRequest, ModelError
from service.chat_template import ChatTemplate
from service.text import OutputText
from service.tokenizer import Tokenizer

SAMPLE = "Hello, wörld! 你好 😀\n\ttabs  and   spaces"
LLAMA2_DECODER = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
        {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_dir)


def sentencepiece_file(folder: Path, decoder: dict[str, Any] | None = None) -> Path:
    """A small byte-fallback BPE tokenizer with the decoder of Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab"]
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
            for i in range(3)
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ]},
        "pre_tokenizer": None, "post_processor": None, "decoder": decoder or LLAMA2_DECODER,
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "byte_fallback": True,
                  "unk_token": "<unk>", "merges": [["\u2581", "a"], ["a", "b"]]},
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_any_ids_decode_as_the_library_decodes_them(tokenizer: Tokenizer, tiny_dir: Path) -> None:
    library = FastTokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    draw = random.Random(1)
    for _ in range(2000):
        ids = [draw.randrange(49_152) for _ in range(draw.randrange(1, 12))]
        for skip in (True, False):
            assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_text_survives_the_round_trip(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(SAMPLE)
    assert tokenizer.decode(ids) == SAMPLE
    assert b"".join(map(tokenizer.table.bytes_of, ids)) == SAMPLE.encode()
    assert tokenizer.table.bytes_of(10**6) == b""


def test_sentencepiece_decodes_as_the_library_does(tmp_path: Path) -> None:
    folder = sentencepiece_file(tmp_path / "sp")
    tokenizer, library = Tokenizer.load(folder), FastTokenizer.from_file(str(folder / "tokenizer.json"))
    for text in ("ab a b", "a 你好 😀 b", "  a", "héllo"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == library.decode(ids) == text
    euro = [3 + byte for byte in "€".encode()]
    for ids in (euro[:2], [*euro[:2], 260], [3 + 0xFF, 3 + 0xC3, 262]):
        assert tokenizer.decode(ids) == library.decode(ids), "one U+FFFD for each byte"


def test_generated_text_keeps_the_space_that_a_whole_text_loses(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(sentencepiece_file(tmp_path / "sp"))
    ids = tokenizer.encode("a b", add_special_tokens=False)
    output = OutputText(tokenizer.table)
    assert "".join(map(output.push, ids)) + output.settle() == " a b"
    assert tokenizer.decode(ids) == "a b"


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}, "Metaspace"),
    ],
)
def test_another_decoder_is_refused_by_name(tmp_path: Path, decoder: dict[str, Any], name: str) -> None:
    folder = sentencepiece_file(tmp_path / "other", decoder)
    with pytest.raises(ModelError, match=f"decoder {name} is not supported"):
        Tokenizer.load(folder)


def test_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = sentencepiece_file(tmp_path / "sp")
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json must hold a JSON object"):
        Tokenizer.load(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer.load(folder)


def test_a_chat_has_exactly_the_special_tokens_of_its_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.encode_chat(messages)
    assert ids.count(1) == 3, "system, user, assistant: one opening token each"
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert not tokenizer.decode(
        tokenizer.encode_chat(messages, add_generation_prompt=False), skip_special_tokens=False
    ).endswith("assistant\n")
    folder = sentencepiece_file(tmp_path / "sp")
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer.load(folder).encode_chat(messages)
    config = {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    bos_first = Tokenizer.load(folder).encode_chat([{"role": "user", "content": "ab"}])
    assert bos_first.count(1) == 1


def test_templates_get_their_helpers_and_are_sandboxed() -> None:
    def render(source: str, **variables: Any) -> str:
        template = ChatTemplate(source, {"eos_token": "</s>"})
        return template.render([{"role": "user", "content": "<é>"}], variables=variables)

    assert render("{% for m in messages %}{{ m.content }}{% break %}{% endfor %}{{ eos_token }}") == "<é></s>"
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "<é>"}]'
    assert render("{% generation %}x{{ depth }}{% endgeneration %}", depth=3) == "x3"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{% if tools is none %}none{% endif %}") == "none"
    for source in ("{{ raise_exception('roles must alternate') }}", "{{ messages.__class__.__mro__ }}", "{{ 1 // 0 }}",
                   "{{ messages[3].content.x }}", "{{ range(10**9) }}"):
        with pytest.raises(InvalidRequest, match="the model's chat template refuses it"):
            render(source)
