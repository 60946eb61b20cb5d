"""The key file, the key store, and the commands that make keys: what is accepted, refused and kept."""

from __future__ import annotations

import gc
import hashlib
import io
import json
import re
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from quipu.web.auth.key_file import KeyFileError, hash_key, new_key, read_key_file
from quipu.web.auth.keys import KeyStore, given_keys
from quipu.web.cli.cli import main, make_parser
from quipu.web.cli.keys import key_store

DEPTHS = (10, 900, 3_000, 200_000)
"""Nesting in a file: a depth that parsers accept, and one that none does."""
KEY = "sk-quipu-of-acme"
ENTRY: dict[str, Any] = {"id": "ci", "name": "CI, nightly", "tenant": "acme", "sha256": hash_key(KEY)}


def write(path: Path, *entries: object) -> Path:
    path.write_text(json.dumps({"keys": entries}))
    return path


def other(number: int) -> dict[str, Any]:
    return {"id": f"k{number}", "name": "x", "tenant": f"t{number}", "sha256": hash_key(f"key {number}")}


def test_toml_and_json(tmp_path: Path) -> None:
    """TOML and JSON are equivalent, and the case of a hash does not matter."""
    as_json = write(tmp_path / "keys.json", ENTRY, {**other(1), "admin": True})
    as_toml = tmp_path / "keys.toml"
    as_toml.write_text(
        f'[[keys]]\nid = "ci"\nname = "CI, nightly"\ntenant = "acme"\nsha256 = "{hash_key(KEY).upper()}"\n'
        f'[[keys]]\nid = "k1"\nname = "x"\ntenant = "t1"\nsha256 = "{hash_key("key 1")}"\nadmin = true\n'
    )
    assert read_key_file(as_json) == read_key_file(as_toml)
    ring = KeyStore(path=as_toml).ring
    owner, admin = ring.find(KEY), ring.find("key 1")
    assert owner is not None and admin is not None
    assert (owner.tenant, owner.key_id, owner.key_name, owner.is_admin) == ("acme", "ci", "CI, nightly", False)
    assert (admin.tenant, admin.is_admin) == ("t1", True)
    assert (ring.num_keys, ring.num_admin_keys) == (2, 1)


@pytest.mark.parametrize("key", ["", KEY[:-1], KEY + " ", KEY.upper(), hash_key(KEY), "clé"])
def test_only_the_key_is_found(key: str, tmp_path: Path) -> None:
    """Only the key itself finds its owner; its hash, which is in the file, does not."""
    assert KeyStore(path=write(tmp_path / "keys.json", ENTRY)).ring.find(key) is None


@pytest.mark.parametrize(
    ("entry", "names"),
    [
        ({"key": KEY}, ["keys[1] (k1)", "`key`"]),
        ({"tenent": "acme"}, ["keys[1] (k1)", "`tenent`"]),
        ({"sha256": hash_key(KEY)[:32]}, ["keys[1] (k1)", "`sha256`", "32"]),
        ({"sha256": KEY}, ["keys[1] (k1)", "`sha256`"]),
        ({"sha256": hash_key("")}, ["keys[1] (k1)", "`sha256`"]),
        ({"sha256": hash_key(KEY) + "\n"}, ["keys[1] (k1)", "`sha256`"]),
        ({"sha256": None}, ["keys[1] (k1)", "`sha256`"]),
        ({"admin": "yes"}, ["keys[1] (k1)", "`admin`"]),
        ({"admin": 1}, ["keys[1] (k1)", "`admin`"]),
        ({"tenant": ""}, ["keys[1] (k1)", "`tenant`"]),
        ({"tenant": "a\nb"}, ["keys[1] (k1)", "`tenant`"]),
        ({"name": "a\x00"}, ["keys[1] (k1)", "`name`"]),
        ({"name": "x" * 129}, ["keys[1] (k1)", "`name`"]),
        ({"id": 7}, ["keys[1]", "`id`"]),
        ({"id": "-"}, ["keys[1]", "`id`"]),
        ({"id": "ci"}, ["`id` ci"]),
        ({"sha256": ENTRY["sha256"]}, ["k1", "`sha256`", "ci"]),
    ],
)
def test_bad_entry(entry: dict[str, Any], names: list[str], tmp_path: Path) -> None:
    """A file with one bad entry is refused completely; the message names entry and field, and shows no
    value of a hash."""
    path = write(tmp_path / "keys.json", ENTRY, {**other(1), **entry})
    with pytest.raises(KeyFileError) as refused:
        KeyStore(path=path)
    message = str(refused.value)
    for name in names:
        assert name in message
    assert KEY not in message and not re.search("[0-9a-f]{16}", message)


@pytest.mark.parametrize("field", ["id", "name", "tenant", "sha256"])
def test_missing_field(field: str, tmp_path: Path) -> None:
    """All fields but the flags are required."""
    entry = {name: value for name, value in ENTRY.items() if name != field}
    with pytest.raises(KeyFileError, match=rf"keys\[0\].*`{field}`"):
        KeyStore(path=write(tmp_path / "keys.json", entry))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("keys.toml", b"[[keys]]\nid = "),
        ("keys.toml", b"[[keys]]\nid = '\xff'"),
        ("keys.toml", b""),
        ("keys.toml", b"keys = 3"),
        ("keys.json", b"{"),
        ("keys.json", b"[]"),
        ("keys.json", b'{"keys": [3]}'),
        ("keys.json", b'{"keys": [], "key": []}'),
        *(("keys.json", b"[" * depth) for depth in DEPTHS),
        *(("keys.json", b'{"keys":' * depth + b"1" + b"}" * depth) for depth in DEPTHS),
        *(("keys.json", b'{"keys": [' + b"[" * depth + b"]" * depth + b"]}") for depth in DEPTHS),
        *(("keys.toml", b"keys = " + b"[" * depth + b"]" * depth) for depth in DEPTHS),
        *(("keys.toml", b"keys = " + b"{a = " * depth + b"1" + b"}" * depth) for depth in DEPTHS),
        ("keys.toml", b"keys" + b".a" * DEPTHS[-1] + b" = 1"),
        ("keys.toml", b"keys = " + b"9" * 5000),
        ("keys.json", b'{"keys": ' + b"9" * 5000 + b"}"),
    ],
    ids=range(31),
)
def test_bad_file(name: str, content: bytes, tmp_path: Path) -> None:
    """An invalid or missing file is refused with its name."""
    path = tmp_path / name
    with pytest.raises(KeyFileError, match=name):
        KeyStore(path=path)
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=name):
        KeyStore(path=path)


def test_reload(tmp_path: Path) -> None:
    """A reload admits new keys and drops removed ones; a failing reload changes nothing; keys from flags
    always remain."""
    path = write(tmp_path / "keys.json", ENTRY)
    store = KeyStore(given_keys([hash_key("given")], []), path)
    write(path, other(1))
    store.reload()
    assert store.ring.find(KEY) is None and store.ring.find("key 1") is not None
    write(path, ENTRY, {**other(1), "sha256": "short"})
    with pytest.raises(KeyFileError):
        store.reload()
    assert store.ring.find(KEY) is None and store.ring.find("key 1") is not None
    for depth in DEPTHS:
        path.write_text('{"keys": [' + "[" * depth + "]" * depth + "]}")
        with pytest.raises(KeyFileError):
            store.reload()
    path.unlink()
    with pytest.raises(KeyFileError):
        store.reload()
    assert store.ring.find("key 1") is not None and store.ring.find("given") is not None


def test_key_file_without_keys_is_closed(tmp_path: Path) -> None:
    """Only a server without any key flag is open: with an empty key file every request is refused."""
    assert KeyStore().is_open
    assert not KeyStore(path=write(tmp_path / "keys.json")).is_open
    assert not KeyStore(given_keys([], [hash_key("x")])).is_open


def store_of(environment: dict[str, str], *flags: str) -> KeyStore:
    return key_store(make_parser().parse_args(["serve", *flags]), environment)


def test_flags_and_environment() -> None:
    """Keys from the flag and the variable belong to the default tenant; the variables are removed, so children do not
    inherit them."""
    environment = {"QUIPU_API_KEY": "first", "QUIPU_ADMIN_KEY": "boss", "PATH": "/bin"}
    ring = store_of(environment, "--api-key", "second", "--api-key", "third").ring
    assert environment == {"PATH": "/bin"}
    owners = {key: ring.find(key) for key in ("first", "second", "third", "boss")}
    assert [owner and owner.key_id for owner in owners.values()] == [
        "api-key-1",
        "api-key-2",
        "api-key-3",
        "admin-key-1",
    ]
    assert [owner and owner.is_admin for owner in owners.values()] == [False, False, False, True]
    assert {owner and owner.tenant for owner in owners.values()} == {"default"}


def test_nothing_keeps_the_plain_key() -> None:
    """Once the flags are parsed, no object in the process refers to a key that was given by one."""
    key = "".join(["sk-", "quipu-", "looked-for"])
    arguments = make_parser().parse_args(["serve", "--api-key", key])
    assert key not in repr(arguments) and hash_key(key) in arguments.api_key
    store = key_store(arguments, {})
    assert store.ring.find(key) is not None
    assert [held for held in gc.get_referrers(key) if not isinstance(held, FrameType)] == []


@pytest.mark.parametrize("bad", ["", "two words", "schlüssel", "tab\t"])
def test_invalid_key_flag(bad: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no header can carry is refused at startup and not shown; an empty variable does not open the
    server."""
    monkeypatch.setenv("QUIPU_API_KEY", bad)
    assert main(["serve", "--executor", "fake"]) == 2
    monkeypatch.delenv("QUIPU_API_KEY", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--executor", "fake", "--admin-key", bad])
    assert ended.value.code == 2
    complaint = capfd.readouterr().err
    assert "QUIPU_API_KEY: " in complaint and "argument --admin-key: " in complaint
    assert not bad or bad not in complaint


def test_one_key_two_owners() -> None:
    """A key cannot have two owners."""
    with pytest.raises(KeyFileError, match=r"admin-key-1.*api-key-1"):
        store_of({}, "--api-key", "same", "--admin-key", "same")


@pytest.mark.parametrize("admin", [False, True])
def test_new_key(admin: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout is an entry for the key file without the key; stderr has the key, which then authenticates."""
    names = ["--tenant", "acme", "--name", 'the "big" one ü']
    assert main(["keys", "new", *names, *(["--admin"] if admin else [])]) == 0
    captured = capsys.readouterr()
    (key,) = re.findall(r"sk-quipu-\S+", captured.err)
    assert "sk-" not in captured.out and key.startswith("sk-quipu-admin-") == admin
    path = tmp_path / "keys.toml"
    path.write_text(captured.out)
    owner = KeyStore(path=path).ring.find(key)
    assert owner is not None
    assert (owner.tenant, owner.key_name, owner.is_admin) == ("acme", 'the "big" one ü', admin)
    (entry,) = tomllib.loads(captured.out)["keys"]
    assert entry["sha256"] == hashlib.sha256(key.encode()).hexdigest()


def test_new_keys_differ() -> None:
    """Keys have 256 random bits: 43 characters after the prefix."""
    keys = {new_key(admin=False) for _ in range(1000)}
    assert len(keys) == 1000
    assert {len(key.removeprefix("sk-quipu-")) for key in keys} == {43}


def test_bad_names_for_a_new_key(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that the key file would refuse is refused before a key is made."""
    assert main(["keys", "new", "--tenant", "two words", "--name", "x"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "`tenant`" in captured.err and "sk-quipu" not in captured.err


def test_hash_of_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The newline that `echo` adds is not part of the key; an empty key is refused."""
    monkeypatch.setattr("sys.stdin", io.StringIO(KEY + "\n"))
    assert main(["keys", "hash"]) == 0
    assert capsys.readouterr().out == hash_key(KEY) + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["keys", "hash"]) == 2
    assert capsys.readouterr().out == ""


def test_adapters_of_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new key may use the adapters that are named, none, or all; the entry that is printed says so."""
    for flags, expected in (
        (["--adapters", "one", "team/two"], frozenset({"one", "team/two"})),
        (["--adapters"], frozenset()),
        ([], None),
    ):
        assert main(["keys", "new", "--tenant", "acme", "--name", "CI", *flags]) == 0
        printed = capsys.readouterr()
        (tmp_path / "keys.toml").write_text(printed.out)
        principal = KeyStore((), tmp_path / "keys.toml").ring.find(printed.err.split()[-1])
        assert principal is not None and principal.adapters == expected
