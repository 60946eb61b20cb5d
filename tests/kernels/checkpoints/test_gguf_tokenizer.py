"""Tokenizers from the keys of GGUF files: the same ids for any text as with the tokenizer that was converted."""

from __future__ import annotations

import json
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from quipu.kernels.checkpoints.gguf_file import GgufFile
from quipu.kernels.checkpoints.gguf_folder import make_gguf_folder
from quipu.kernels.checkpoints.gguf_splitting import SPLITTING
from quipu.kernels.checkpoints.gguf_tokenizer import make_tokenizer
from tests.kernels.checkpoints.gguf_files import write_gguf
from tests.tiny import TINY

DEMO = Path(__file__).resolve().parents[3] / "kernels" / "demo" / "checkpoint"
_CHARACTERS = (
    "abcdefgh ijk 0123456789  \n\t.,;:!?'\"()[]{}<>|/\\-_=+*&%$#@~`äöüßéñçøжшя中文字日本語한국어🙂🚀\u200d\u00a0"
)
_WORDS = (
    *("the", "of", "and", "don't", "I'LL", "THEY'RE", "1234567", "3.14159", "café", "naïve", "https://a.b/c"),
    *("<|im_start|>", "<|im_end|>", "<tool_call>"),
)


def texts() -> list[str]:
    draw = random.Random(0)
    found = ["", " ", "\n\n\n", "   leading", "trailing   ", "a\r\nb", "x" * 500]
    for _ in range(300):
        found.append("".join(draw.choices(_CHARACTERS, k=draw.randrange(1, 60))))
        found.append(draw.choice((" ", "", "\n")).join(draw.choices(_WORDS, k=draw.randrange(1, 12))))
    return found


@pytest.mark.parametrize(("folder", "pre"), [(TINY, "gpt-2"), (DEMO, "qwen2")])
def test_byte_level(tmp_path: Path, checkpoints: dict[str, Path], folder: Path, pre: str) -> None:
    """Give equal ids and equal text, special tokens included, and the same chat template."""
    write_gguf(tmp_path / "m.gguf", "llama", checkpoints["llama"], tokenizer=folder, pre=pre)
    made = make_gguf_folder(tmp_path / "m.gguf")
    found, expected = (Tokenizer.from_file(str(path / "tokenizer.json")) for path in (made, folder))
    for text in texts():
        ids = expected.encode(text).ids
        assert found.encode(text).ids == ids, text
        for skips in (False, True):
            assert found.decode(ids, skip_special_tokens=skips) == expected.decode(ids, skip_special_tokens=skips)
    config, own = (json.loads((path / "tokenizer_config.json").read_text()) for path in (made, folder))
    template = folder / "chat_template.jinja"
    assert config.get("chat_template") == (template.read_text() if template.exists() else own.get("chat_template"))
    assert config.get("eos_token") == own.get("eos_token")


def keys_of(tokens: list[str], **more: Any) -> GgufFile:
    keys = {
        "model": "gpt2",
        "pre": "llama-bpe",
        "tokens": tokens,
        "token_type": [1] * len(tokens),
        "merges": ["a b"],
        **more,
    }
    return GgufFile(Path("m.gguf"), {f"tokenizer.ggml.{name}": value for name, value in keys.items()}, {})


def encode(file: GgufFile, text: str) -> list[int]:
    return Tokenizer.from_str(json.dumps(make_tokenizer(file))).encode(text).ids


def test_first_token() -> None:
    """Begin a text with the first token where the file says so, or where its splitting implies it."""
    tokens = ["a", "b", "ab", "<s>"]
    kinds = [1, 1, 1, 3]
    assert encode(keys_of(tokens, token_type=kinds, bos_token_id=3), "ab") == [3, 2]
    assert encode(keys_of(tokens, token_type=kinds, bos_token_id=3, add_bos_token=False), "ab") == [2]
    assert encode(keys_of(tokens, token_type=kinds, bos_token_id=3, pre="qwen2"), "ab<s>a") == [2, 3, 0]


def test_listed_merges_of_gemma4() -> None:
    """Merge what is listed first, whatever its score, without a space before the text; newlines are text like other."""
    tokens = ["<unk>", "<bos>", "a", "b", "\u2581", "ab", "\u2581a", "\n", "\n\n", "<0xC3>", "<0xA9>", "<|tool_call>"]
    more: dict[str, Any] = {
        "model": "gemma4", "token_type": [2, 3, *[1] * 7, 6, 6, 4], "merges": ["\u2581 a", "a b", "\n \n"],
        "bos_token_id": 1, "unknown_token_id": 0, "add_space_prefix": False, "scores": [0.0] * 12,
    }  # fmt: skip
    file = keys_of(tokens, **more)
    assert encode(file, "ab ab") == [1, 5, 6, 3]
    assert encode(file, "a\n\nb\u00e9<|tool_call>") == [1, 2, 8, 3, 9, 10, 11]
    with pytest.raises(ValueError, match="'a c', which is not two tokens"):
        make_tokenizer(keys_of(tokens, **{**more, "merges": ["a c"]}))


def test_white_space_behind_special_tokens_of_phi3() -> None:
    """Drop white space behind the tokens of Phi-3's turns, as its own tokenizer does, and for no other model."""
    tokens = ["<unk>", "<s>", "<|user|>", "<0x0A>", "a", "\u2581", "\u2581a"]
    more: dict[str, Any] = {"model": "llama", "token_type": [2, 3, 3, 6, 1, 1, 1], "scores": [0.0] * 7}
    file = keys_of(tokens, **more)
    assert encode(file, "<|user|>\na") == [2, 5, 3, 4]
    phi = attrs.evolve(file, keys={**file.keys, "general.architecture": "phi3"})
    assert encode(phi, "<|user|>\na") == [2, 6]
    assert encode(phi, "<unk>a") == [0, 6]


_OTHER_NAMES = {
    "llama-bpe": "falcon3 falcon-h1 pixtral midm-2.0 lfm2 llama3 llama-v3 jina-v5-nano",
    "dbrx": "smaug-bpe glm4 chatglm-bpe",
    "qwen2": "deepseek-r1-qwen f2llmv2",
    "megrez": "kormo stablelm2 hunyuan solar-open grok-2",
    "gpt-2": "phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum exaone4 modern-bert mpt olmo jais",
    "jais": "trillion granite-docling",
    "smollm": "starcoder refact command-r codeshell exaone minerva-7b mellum2",
    "deepseek-v3": "hunyuan-dense",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
}


@pytest.mark.parametrize(
    ("pre", "other"), [(pre, other) for pre, names in _OTHER_NAMES.items() for other in names.split()]
)
def test_other_names_of_a_splitting(pre: str, other: str) -> None:
    """Make the same tokenizer for every name that llama.cpp has for a splitting."""
    tokens = ["a", "b", "ab", "<s>"]
    made, expected = (make_tokenizer(keys_of(tokens, pre=name, bos_token_id=3)) for name in (other, pre))
    assert made == expected


def test_qwens_pattern_without_its_normalizer() -> None:
    """Split as Qwen does; only Qwen's own tokenizers compose characters."""
    own, other = (make_tokenizer(keys_of(["a", "b", "ab"], pre=pre)) for pre in ("qwen2", "megrez"))
    assert own.pop("normalizer") == {"type": "NFC"} and other.pop("normalizer") is None
    assert own == other


def test_splitting_of_deepseek_llm() -> None:
    """Split as DeepSeek-V2's tokenizer does: lines, letters with case, punctuation, other letters, each digit."""
    steps = ("[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~]+", r"\s+$", "[\u0800-\u9fa5\uac00-\ud7ff]+")
    theirs = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in steps),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    file = keys_of(["a", "b", "ab"], pre="deepseek-llm")
    ours = Tokenizer.from_str(json.dumps(make_tokenizer(file))).pre_tokenizer
    for text in [*texts(), "1234 \u03b1\u03b2 \u2126\u212a x  "]:
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-4o"])
def test_splitting_of_openai(pre: str) -> None:
    """Split text as tiktoken's vocabulary of that name does."""
    import regex
    from tiktoken_ext import openai_public

    theirs = {"llama-bpe": openai_public.cl100k_base, "gpt-4o": openai_public.o200k_base}[pre]
    pattern = _pattern_of(theirs)
    own = SPLITTING[pre].pattern
    assert own is not None
    for text in texts():
        assert regex.findall(own, text) == regex.findall(pattern, text), text


def _pattern_of(load: Any) -> str:
    """Return the pattern in a constructor of tiktoken, without the download of its vocabulary."""
    from tiktoken_ext import openai_public

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
        return str(load()["pat_str"])


class SentencePieces:
    """Merges the adjacent pair with the best score, as SentencePiece does: slowly, and in a dozen lines."""

    def __init__(self, tokens: list[str], scores: list[float]) -> None:
        self._ids = {token: number for number, token in enumerate(tokens)}
        self._scores = scores

    def encode(self, text: str) -> list[int]:
        parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
        while True:
            pairs = [
                (-self._scores[self._ids[a + b]], at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in self._ids
            ]
            if not pairs:
                break
            _, at = min(pairs)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids = []
        for part in parts:
            if part in self._ids:
                ids.append(self._ids[part])
            else:
                ids += [self._ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        return ids


def test_sentence_pieces() -> None:
    """Give the ids of SentencePiece's algorithm, bytes of unknown characters included, and the text back."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Fuse()
    # a token with this text would be a special one
    corpus = [text for text in texts() if text.isascii() and "<|im_end|>" not in text] + [
        "the model and the other of the same"
    ] * 5
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(corpus, trainer)
    learned = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    tokens = [token for token, _ in learned[:3]] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(learned) - 3)
    tokens += [token for token, _ in learned[3:]]
    scores = [0.0] * 259 + [-float(number) for number in range(len(learned) - 3)]
    file = keys_of(tokens, model="llama", token_type=kinds, scores=scores, bos_token_id=1, unknown_token_id=0)
    found, oracle = Tokenizer.from_str(json.dumps(make_tokenizer(file))), SentencePieces(tokens, scores)
    for text in texts():
        ids = found.encode(text).ids
        assert ids == [1, *oracle.encode(text)], text
        assert found.decode(ids) == text
    assert 2 in found.encode("a</s>b").ids


class CountedText(str):
    """A text that counts how many characters are copied out of it."""

    __slots__ = ()
    num_copied = 0

    def __getitem__(self, place: Any) -> str:
        part = super().__getitem__(place)
        CountedText.num_copied += len(part)
        return part


def merges_of(tokens: list[str]) -> list[list[str]]:
    file = keys_of(tokens, model="llama", token_type=[1] * len(tokens), scores=[0.0] * len(tokens))
    merges: list[list[str]] = make_tokenizer(file)["model"]["merges"]
    return merges


def test_merges_are_all_cuts_into_tokens() -> None:
    """Find what trying every place of every token finds, in the same order."""
    draw = random.Random(5)
    for _ in range(50):
        drawn = ("".join(draw.choices("ab", k=draw.randint(1, 9))) for _ in range(60))
        tokens = list(dict.fromkeys(["a", "b", *drawn]))
        cuts = [
            (number, tokens.index(token[:at]), tokens.index(token[at:]), at)
            for number, token in enumerate(tokens)
            for at in range(1, len(token))
            if token[:at] in tokens and token[at:] in tokens
        ]
        assert merges_of(tokens) == [[tokens[number][:at], tokens[number][at:]] for number, *_, at in sorted(cuts)]


@pytest.mark.parametrize("tokens", [["a", "a" * 20_000], ["a", *("a" * 2_000 + "b" * k + "c" for k in range(40))]])
def test_long_tokens_are_not_copied_at_every_place(monkeypatch: pytest.MonkeyPatch, tokens: list[str]) -> None:
    """Copy a vocabulary's characters a few times, however long one of its tokens is."""
    monkeypatch.setattr(CountedText, "num_copied", 0)
    assert merges_of([CountedText(token) for token in tokens]) == []
    assert CountedText.num_copied <= 3 * sum(map(len, tokens))


def test_too_many_merges() -> None:
    """Refuse tokens that consist of others in so many ways that listing them takes gigabytes."""
    tokens = ["a" * size for size in range(1, 1200)]
    file = keys_of(tokens, model="llama", token_type=[1] * len(tokens), scores=[0.0] * len(tokens))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"tokenizer\.ggml\.tokens' has tokens that consist of others in too many"):
            make_tokenizer(file)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": "t5"}, "tokenizer.ggml.model' is 't5'"),
        ({"pre": "default"}, "tokenizer.ggml.pre' is 'default'"),
        ({"pre": None}, "tokenizer.ggml.pre' is None"),
        ({"pre": "jina-v1-en"}, "tokenizer.ggml.pre' is 'jina-v1-en'"),
        ({"pre": "jina-v2-code"}, "tokenizer.ggml.pre' is 'jina-v2-code'"),
        ({"pre": "roberta-bpe"}, "tokenizer.ggml.pre' is 'roberta-bpe'"),
        ({"add_sep_token": True}, "tokenizer.ggml.add_sep_token' is true"),
        ({"tokens": ["a", "b", "a"]}, "has token 'a' twice"),
        ({"tokens": []}, "tokenizer.ggml.tokens' must be a list"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type' must have"),
        ({"merges": ["a c"]}, "tokenizer.ggml.merges' has 'a c'"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges' has 'ab'"),
        ({"bos_token_id": 7}, "tokenizer.ggml.bos_token_id' is 7"),
        ({"model": "llama"}, "tokenizer.ggml.scores' must have"),
        ({"model": "llama", "scores": ["1", "2", "3"]}, "tokenizer.ggml.scores' must have"),
    ],
)
def test_refused_vocabularies(changes: dict[str, Any], named: str) -> None:
    """Refuse what cannot be represented exactly, by the key's name."""
    with pytest.raises(ValueError, match=named):
        make_tokenizer(keys_of(**{"tokens": ["a", "b", "ab"], "token_type": [1, 1, 1], **changes}))


def test_splitting_of_tekken() -> None:
    """Keep neither contractions nor numbers together, unlike the splitting of GPT-4o that it is otherwise like."""
    import regex

    pattern = SPLITTING["tekken"].pattern
    assert pattern is not None
    assert regex.findall(pattern, "don't STOP2024 now/\n") == ["don", "'t", " STOP", "2", "0", "2", "4", " now", "/\n"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("deepseek-v3", ["don", "'t", " stop", " ", "202", "4", "\u5e74", "x", " ...\n", ".b"]),
        ("deepseek-coder", ["don", "'", "t", " stop", " ", "2", "0", "2", "4", "\u5e74", "x", " ...", "\n", ".", "b"]),
    ],
)
def test_splitting_of_deepseek(pre: str, pieces: list[str]) -> None:
    """Split by one pattern after the other, what lies between the matches of one by the next."""
    steps = make_tokenizer(keys_of(["a", "b", "ab"], pre=pre))["pre_tokenizer"]["pretokenizers"]
    patterns = [one["pattern"]["Regex"] for one in steps[:-1]]
    splits = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(one), "isolated") for one in patterns])
    text = "don't stop 2024\u5e74x ...\n.b"
    assert [piece for piece, _ in splits.pre_tokenize_str(text)] == pieces
