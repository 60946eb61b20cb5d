"""Secret files of the object store tier, the keys derived from them, and the names of objects."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from quipu.actors.engine.mover.remote_keys import ENCRYPT_FLAG, SECRET_FLAG, RemoteKeys, read_remote_keys, read_secret
from quipu.actors.engine.mover.remote_names import BlockNames

SECRET = hashlib.sha256(b"a secret").digest()
OTHER = hashlib.sha256(b"another").digest()
KEY = hashlib.sha256(b"a prompt").digest()


def secret_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    "content",
    [
        SECRET,
        SECRET.hex().encode(),
        SECRET.hex().upper().encode() + b"\n",
        base64.b64encode(SECRET) + b"\n",
        base64.urlsafe_b64encode(SECRET),
    ],
    ids=["raw", "hex", "upper case", "base64", "base64 for URLs"],
)
def test_every_form_of_a_secret_is_read(tmp_path: Path, content: bytes) -> None:
    """The same secret in each form that tools write gives the same bytes."""
    assert read_secret(secret_file(tmp_path, content), SECRET_FLAG) == SECRET


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "must have 32 bytes"),
        (SECRET[:31], "must have 32 bytes"),
        (SECRET + b"\n", "must have 32 bytes"),
        (SECRET.hex()[:32].encode(), "must have 32 bytes"),
        (b"z" * 64, "must have 32 bytes"),
        (b"correct horse battery staple", "must have 32 bytes"),
        (base64.b64encode(SECRET[:30]), "must have 32 bytes"),
        (bytes(32), "not random"),
        (b"0" * 64, "not random"),
        (b"ab" * 32, "not random"),
        (SECRET.hex().encode() * 100, "must have 32 bytes"),
    ],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """Anything else is an error that names the flag and the file, and shows nothing of the contents."""
    path = secret_file(tmp_path, content)
    with pytest.raises(ValueError, match=reason) as caught:
        read_secret(path, ENCRYPT_FLAG)
    assert str(caught.value).startswith(f"{ENCRYPT_FLAG}: ")
    assert str(path) in str(caught.value)
    assert not content or content.decode("latin-1")[:8] not in str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o666])
def test_a_file_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    """A secret that other users may read, or a group may replace, is an error that says what to do."""
    with pytest.raises(ValueError, match=f"--kv-remote-secret: .*mode {mode:04o}.*chmod 600"):
        read_secret(secret_file(tmp_path, SECRET, mode), SECRET_FLAG)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_a_group_may_read_a_secret(tmp_path: Path, mode: int) -> None:
    """Files that a cluster mounts for a group are accepted."""
    assert read_secret(secret_file(tmp_path, SECRET, mode), SECRET_FLAG) == SECRET


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    """A missing file, a folder and a pipe without a writer are errors that name the flag."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name in ("missing", "pipe", "folder"):
        with pytest.raises(ValueError, match="--kv-remote-secret: "):
            read_secret(tmp_path / name, SECRET_FLAG)


def test_one_of_the_files_is_required() -> None:
    """A bucket without any secret is an error that names both flags."""
    with pytest.raises(ValueError, match="--kv-remote needs --kv-remote-secret FILE or --kv-remote-encrypt FILE"):
        read_remote_keys(None, None)


def test_keys_are_derived_by_hkdf() -> None:
    """The derivation is the one of RFC 5869, as another library computes it."""
    keys = RemoteKeys.derive(SECRET, None)
    for purpose, key in ((b"names", keys.names), (b"objects", keys.objects)):
        salt = b"quipu kv blocks in an object store, v1"
        assert HKDF(SHA256(), 32, salt, purpose).derive(b"secret" + SECRET) == key


def test_all_keys_depend_on_all_secrets() -> None:
    """No two combinations of secrets share a key, and nothing shows one."""
    combinations = [(SECRET, None), (None, SECRET), (SECRET, OTHER), (OTHER, SECRET), (SECRET, SECRET), (OTHER, None)]
    derived = [RemoteKeys.derive(*combination) for combination in combinations]
    assert len({key for keys in derived for key in (keys.names, keys.objects)}) == 2 * len(combinations)
    assert [keys.is_encrypted for keys in derived] == [False, True, True, True, True, False]
    assert repr(derived[0]) == "RemoteKeys(is_encrypted=False)"


def test_names_differ_by_secret_numerics_and_key() -> None:
    """Servers that agree in all three name a block alike; a difference in any gives another name."""
    keys = RemoteKeys.derive(SECRET, None)
    one = BlockNames(keys, "numerics")
    path = one.path_of(one.digest_of(KEY))
    assert BlockNames(RemoteKeys.derive(SECRET, None), "numerics").path_of(one.digest_of(KEY)) == path
    others = [
        BlockNames(RemoteKeys.derive(OTHER, None), "numerics").digest_of(KEY),
        BlockNames(keys, "numerics2").digest_of(KEY),
        BlockNames(keys, "numerics").digest_of(KEY[:-1] + b"\0"),
        BlockNames(RemoteKeys.derive(SECRET, OTHER), "numerics").digest_of(KEY),
    ]
    assert len({one.digest_of(KEY), *others}) == 5


def test_names_are_hmacs() -> None:
    """A name is what the page says: 128 bits of an HMAC-SHA256, below its first byte."""
    keys = RemoteKeys.derive(SECRET, None)
    names = BlockNames(keys, "n")
    digits = hmac.new(keys.names, b"block\0n\0" + KEY, "sha256").hexdigest()[:32]
    assert names.path_of(names.digest_of(KEY)) == f"{names.folder}/{digits[:2]}/{digits}"
    assert names.name_in(names.path_of(names.name_of(KEY))) == bytes.fromhex(digits)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: "",
        lambda path: path + "0",
        lambda path: path[:-1],
        lambda path: path.upper(),
        lambda path: "/" + path,
        lambda path: "../" + path,
        lambda path: path.replace("v1", "v2"),
        lambda path: path + "\n",
        lambda path: path[:3] + "0" * 16 + path[19:],
        lambda path: path[:-34] + "/" + path[-32:],
        lambda path: path.replace(path[-35:-33], "zz", 1),
        lambda path: path[:-1] + "٣",
    ],
)
def test_foreign_paths_are_no_names(change: object) -> None:
    """A path that differs in any way from the ones made here has no name in it."""
    names = BlockNames(RemoteKeys.derive(SECRET, None), "n")
    assert callable(change)
    assert names.name_in(change(names.path_of(names.digest_of(KEY)))) is None
