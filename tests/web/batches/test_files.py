"""Files: their shapes, bounds and tenants, and that nothing of them is left once they are deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.batches.batch_values import DAY_S, BatchLimits
from tests.web.batches.batch_bench import BOUNDARY, batch_server, form, jsonl, line

SECRET = "the-knot-of-nobody"


def traces_of(folder: Path, text: str) -> list[Path]:
    """Return the files in which a text occurs."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def modes_of(folder: Path) -> set[int]:
    """Return the modes of all files and folders in a folder."""
    return {path.stat().st_mode & 0o777 for path in folder.rglob("*")}


def secret_lines(num_lines: int = 4) -> bytes:
    return jsonl([line(n) | {"custom_id": f"{SECRET}-{n}"} for n in range(num_lines)])


async def test_uploaded_file_comes_back(tmp_path: Path) -> None:
    """A file is described as OpenAI's, listed, and its contents are those that were uploaded."""
    data = jsonl([line(1)]) * 10_000  # larger than a piece
    async with batch_server(tmp_path) as bench:
        expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
        status, file = await bench.upload(data, **expiry)
        assert status == 200 and file["bytes"] == len(data) and file["filename"] == "in.jsonl"
        assert file["expires_at"] == file["created_at"] + 7200 and file["purpose"] == "batch"
        assert await bench.request("GET", f"/v1/files/{file['id']}") == (200, file)
        _, listed = await bench.request("GET", "/v1/files?purpose=batch&limit=5")
        assert listed["data"] == [file] and listed["has_more"] is False
        unknown, refused = await bench.request("GET", "/v1/files?after=file-other")
        assert (unknown, refused["error"]["param"]) == (400, "after")
        assert await bench.content(file["id"]) == data
    assert modes_of(tmp_path) == {0o700, 0o600}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "7200"}, "expires_after.anchor"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "x"}, "expires_after.seconds"),
        ({"long": "x" * 5000}, "long"),
    ],
)
async def test_bad_form_is_refused(tmp_path: Path, fields: dict[str, str], param: str) -> None:
    """A form that breaks a rule is a 400 that names the field, and nothing of it is kept."""
    async with batch_server(tmp_path) as bench:
        status, answer = await bench.upload(secret_lines(), **fields)
        assert status == 400 and answer["error"]["param"] == param, answer
        assert not traces_of(tmp_path, SECRET) and not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"{}", "application/json"),
        (b"no form", f"multipart/form-data; boundary={BOUNDARY}"),
        (form({}, b"x")[:-20], f"multipart/form-data; boundary={BOUNDARY}"),
        (b"", f"multipart/form-data; boundary={BOUNDARY}"),
        (b"\r\n" * 500_000, f"multipart/form-data; boundary={BOUNDARY}"),
    ],
)
async def test_what_is_no_form_is_refused(tmp_path: Path, body: bytes, content_type: str) -> None:
    """A body that is no form, or not all of one, is a 400."""
    async with batch_server(tmp_path) as bench:
        status, answer = await bench.request("POST", "/v1/files", body, {"Content-Type": content_type})
        assert status == 400, answer
        assert not list((tmp_path / "files").iterdir())


async def test_files_are_bounded(tmp_path: Path) -> None:
    """A file that is too large, or more than its tenant may store, is refused, and nothing of it is kept."""
    limits = BatchLimits(max_file_bytes=10_000, max_tenant_bytes=15_000, max_files=2)
    async with batch_server(tmp_path, limits=limits) as bench:
        status, answer = await bench.upload(b"x" * 10_001)
        assert status == 413 and answer["error"]["code"] == "file_too_large"
        assert (await bench.upload(b"x" * 9_000))[0] == 200
        status, answer = await bench.upload(b"x" * 9_000)
        assert status == 400 and answer["error"]["code"] == "storage_full"
        assert (await bench.upload(b"x"))[0] == 200
        status, answer = await bench.upload(b"x")
        assert status == 400 and answer["error"]["code"] == "too_many_files"
        assert len(list((tmp_path / "files").iterdir())) == 2


async def test_nothing_is_left_of_deleted_files(tmp_path: Path) -> None:
    """After its files are deleted, no byte of a batch's texts is in the folder, its database or its journal."""
    async with batch_server(tmp_path) as bench:
        batch = await bench.start(secret_lines())
        done = await bench.ended(batch["id"])
        assert traces_of(tmp_path, SECRET)
        for file_id in (done["input_file_id"], done["output_file_id"]):
            status, answer = await bench.request("DELETE", f"/v1/files/{file_id}")
            assert status == 200 and answer == {"id": file_id, "object": "file", "deleted": True}
            assert (await bench.request("GET", f"/v1/files/{file_id}"))[0] == 404
        assert not traces_of(tmp_path, SECRET)


async def test_nothing_is_left_of_expired_files(tmp_path: Path) -> None:
    """Files are deleted when their time is over, and batches with them, without a trace."""
    async with batch_server(tmp_path, limits=BatchLimits(file_ttl_s=DAY_S)) as bench:
        done = await bench.ended((await bench.start(secret_lines()))["id"])
        bench.clock.now += DAY_S - 10
        await bench.service.clean_up()
        assert (await bench.batch(done["id"]))["status"] == "completed"
        bench.clock.now += 20
        await bench.service.clean_up()
        assert (await bench.request("GET", f"/v1/batches/{done['id']}"))[0] == 404
        assert (await bench.request("GET", "/v1/files"))[1]["data"] == []
        assert not traces_of(tmp_path, SECRET)


async def test_file_of_a_running_batch_is_kept(tmp_path: Path) -> None:
    """A file that an open batch reads cannot be deleted."""
    async with batch_server(tmp_path, limits=BatchLimits(concurrency=1)) as bench:
        batch = await bench.start(jsonl([line(n, max_tokens=8) for n in range(30)]))
        status, answer = await bench.request("DELETE", f"/v1/files/{batch['input_file_id']}")
        assert status == 400 and answer["error"]["code"] == "file_in_use"
        assert (await bench.ended(batch["id"]))["request_counts"]["completed"] == 30


async def test_tenants_see_their_own(tmp_path: Path) -> None:
    """Another tenant's files and batches do not exist, whatever is asked of them; records name the tenant and key."""
    keys = KeyStore([KeyEntry(id=f"key-{t}", name=t, tenant=t, sha256=hash_key(f"sk-{t}")) for t in ("acme", "umbra")])
    own, other = ({"Authorization": f"Bearer sk-{tenant}"} for tenant in ("acme", "umbra"))
    async with batch_server(tmp_path, keys=keys) as bench:
        done = await bench.ended((await bench.start(secret_lines(), own))["id"], own)
        assert done["request_counts"]["completed"] == 4
        assert {(record.tenant, record.key_id) for record in bench.journal.closed} == {("acme", "key-acme")}
        file_id = done["input_file_id"]
        for method, path in (
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{done['output_file_id']}/content"),
            ("DELETE", f"/v1/files/{file_id}"),
            ("GET", f"/v1/batches/{done['id']}"),
            ("POST", f"/v1/batches/{done['id']}/cancel"),
        ):
            assert (await bench.request(method, path, b"", other))[0] == 404, path
        for path in ("/v1/files", "/v1/batches"):
            assert (await bench.request("GET", path, b"", other))[1]["data"] == []
        theirs, nobodys = [
            await bench.request("GET", f"/v1/files?after={cursor}", b"", other) for cursor in (file_id, "file-x")
        ]
        assert theirs == nobodys and theirs[0] == 400
        body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await bench.request("POST", "/v1/batches", body, other))[0] == 404


async def test_removed_key_runs_nothing(tmp_path: Path) -> None:
    """Once the key of a batch is removed, its lines are refused as that key would be."""
    keys = KeyStore([KeyEntry(id="key-1", name="one", tenant="acme", sha256=hash_key("sk-acme"))])
    headers = {"Authorization": "Bearer sk-acme"}
    async with batch_server(tmp_path / "first", keys=keys, limits=BatchLimits(concurrency=1)) as bench:
        batch = await bench.start(jsonl([line(n, max_tokens=8) for n in range(20)]), headers)
        journal = await bench.snapshot(tmp_path / "second")
    others = KeyStore([KeyEntry(id="key-2", name="two", tenant="acme", sha256=hash_key("sk-other"))])
    async with batch_server(tmp_path / "second", journal, keys=others) as bench:
        headers = {"Authorization": "Bearer sk-other"}
        done = await bench.ended(batch["id"], headers)
        refused = [r for r in await bench.results(done, headers) if r["response"]["status_code"] == 401]
        assert refused and done["request_counts"]["failed"] == len(refused)
