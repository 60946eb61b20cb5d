"""Small tokenizers of the kinds that checkpoints use, with added tokens that are hard to split at."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tiny import TINY

CORPUS = [
    "A quipu is a knotted cord; it's how the Inca kept books, and they didn't lose any.",
    "Ünïcödé ✓ 12345 words  with   spaces\n\nand lines\n",
] * 4
START, END = "<|start|>", "<|end|>"
NESTED = ["<|end|>x<|start|>", "<|start|><|", "|><|", "<|en"]
"""Added tokens that are within, around or across those two."""

PARTS = [
    START,
    END,
    *NESTED,
    "\n",
    "\n\n",
    " ",
    "   ",
    "\t",
    "a",
    "It's",
    "Inca kept",
    "é",
    "e\u0301",
    "✓",
    "🦙",
    "12",
    "x",
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=30).map("".join)
"""Texts with added tokens, parts of them, and characters of several bytes."""


def plain(*contents: str, **flags: bool) -> list[AddedToken]:
    return [AddedToken(content, normalized=False, special=True, **flags) for content in contents]


def tiny() -> Tokenizer:
    """Return the tiny model's byte-level BPE with GPT-2's pattern."""
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


def qwen_like() -> Tokenizer:
    """Return byte-level BPE after NFC and another pattern."""
    tokenizer = tiny()
    tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(r"'s|'t|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def roberta_like() -> Tokenizer:
    """Return byte-level BPE that puts a space before each part, and special tokens around a text."""
    tokenizer = tiny()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.RobertaProcessing(("<|im_end|>", 2), ("<|im_start|>", 1))
    return tokenizer


def llama_2_like() -> Tokenizer:
    """Return SentencePiece-style BPE: a prefix for each part, no pre-tokenizer, byte fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    train = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", *(f"<0x{b:02X}>" for b in range(256))])
    tokenizer.train_from_iterator(CORPUS, train)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing("<unk> $A", special_tokens=[("<unk>", 0)])
    return tokenizer


def metaspace(prepend_scheme: str) -> Tokenizer:
    """Return Unigram after Metaspace, which treats the beginning of a text differently."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"])
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def bert_like() -> Tokenizer:
    """Return WordPiece, lower case without accents."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"]))
    return tokenizer


def byte_tokens() -> Tokenizer:
    """Return tokens named after bytes, as in Llama 2, and special tokens around a text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁hello", "wor", "ld"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[],
        unk_token="<unk>",
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return tokenizer


BASES: dict[str, Callable[[], Tokenizer]] = {
    "tiny": tiny,
    "qwen": qwen_like,
    "roberta": roberta_like,
    "llama 2": llama_2_like,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "bert": bert_like,
}
TOKENS: dict[str, list[AddedToken]] = {
    "plain": plain(START, END),
    "nested": plain(START, END, *NESTED),
    "strips right": plain(START, END, rstrip=True),
    "strips left": [*plain(START), *plain(END, lstrip=True)],
    "whitespace": [*plain(START, rstrip=True), *plain(END, "\n", "\n\n", "  ")],
    "normalized": [*plain(START), AddedToken(END, normalized=True, special=True)],
}


def make(base: str, tokens: str) -> Tokenizer:
    """Return a kind of tokenizer with a kind of added tokens."""
    tokenizer = BASES[base]()
    tokenizer.add_tokens(TOKENS[tokens])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, template: str) -> None:
    """Write the tokenizer's files of a checkpoint."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
