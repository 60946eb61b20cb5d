"""Texts that are sealed for a tenant, and the file with the key."""

from __future__ import annotations

import base64
import stat
import threading
from pathlib import Path

import pytest

from quipu.web.auth.key_file import KeyFileError
from quipu.web.auth.sealed_texts import KEY_NAME, MAX_SEALED_CHARS, MAX_TEXT_BYTES, NotSealedHere, TextSeal, kept_seal


def test_every_bit_counts() -> None:
    """A text is opened as it was, for its tenant alone; with one bit changed, or one byte less, it is not."""
    seal = TextSeal()
    sealed = seal.seal("a", "ein Lärchenwald")
    assert seal.open("a", sealed) == "ein Lärchenwald"
    data = base64.urlsafe_b64decode(sealed)
    changed = [data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :] for at in range(len(data))]
    cut = [data[:at] for at in range(len(data))] + [data[1:], data + b"\0"]
    for other in (*changed, *cut):
        with pytest.raises(NotSealedHere):
            seal.open("a", base64.urlsafe_b64encode(other).decode())
    for opener, tenant in ((seal, "b"), (seal, ""), (TextSeal(), "a")):
        with pytest.raises(NotSealedHere):
            opener.open(tenant, sealed)
    assert seal.seal("a", "x") != seal.seal("a", "x"), "no nonce is used twice"


def test_bounds() -> None:
    """A longer text is cut between two characters, so that what is sealed has a largest size; nothing is larger."""
    seal = TextSeal()
    sealed = seal.seal("a", "x" + "ä" * MAX_TEXT_BYTES)
    assert seal.open("a", sealed) == "x" + "ä" * ((MAX_TEXT_BYTES - 1) // 2)
    assert len(seal.seal("a", "x" * MAX_TEXT_BYTES)) == MAX_SEALED_CHARS
    for other in ("A" * (MAX_SEALED_CHARS + 4), "", "=", "\ud800", "AQ"):
        with pytest.raises(NotSealedHere):
            seal.open("a", other)


def test_key_is_kept(tmp_path: Path) -> None:
    """The next server with the data directory opens what this one has sealed; only the owner may read the key."""
    first = kept_seal(tmp_path)
    path = tmp_path / KEY_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and list(tmp_path.iterdir()) == [path]
    assert kept_seal(tmp_path).open("a", first.seal("a", "x")) == "x"
    assert path.read_bytes().hex() not in repr(first)
    path.chmod(0o644)
    kept_seal(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_key_is_made_once(tmp_path: Path) -> None:
    """Of servers that start at the same time with one data directory, all have the same key."""
    seals: list[TextSeal] = []
    threads = [threading.Thread(target=lambda: seals.append(kept_seal(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sealed = seals[0].seal("a", "x")
    assert len(seals) == 8 and {seal.open("a", sealed) for seal in seals} == {"x"}


def test_broken_key(tmp_path: Path) -> None:
    """A file that is no key is not replaced: what it sealed would be lost. The error names it."""
    for data in (b"", b"x" * 31, b"x" * 33):
        (tmp_path / KEY_NAME).write_bytes(data)
        with pytest.raises(KeyFileError, match=KEY_NAME):
            kept_seal(tmp_path)
    with pytest.raises(KeyFileError, match=KEY_NAME):
        kept_seal(tmp_path / "nowhere")
