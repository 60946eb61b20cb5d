"""Checkpoints of the hub: which files of a repository are fetched, and which of them is served."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from quipu.actors.shared.checkpoint import CheckpointError, resolve
from quipu.actors.shared.hub import HubError, fetch, is_hub_id

REPOSITORY = (
    "README.md",
    "config.json",
    "BF16/Small-BF16-00001-of-00002.gguf",
    "BF16/Small-BF16-00002-of-00002.gguf",
    "Small-F16.gguf",
    "Small-IQ4_XS.gguf",
    "Small-Q4_K_M.gguf",
    "Small-Q4_K_S.gguf",
    "Small-UD-Q4_K_XL.gguf",
    "Small-Q4_K_XL.gguf",
    "mmproj-F16.gguf",
    "mmproj-BF16.gguf",
    "other/small.q8_0.gguf",
    "small-imatrix.gguf",
)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the hub's client "download" what matches of `REPOSITORY`; return the names that it was asked for."""
    downloaded: list[str] = []

    def snapshot_download(
        repository: str,
        *,
        revision: str | None,
        local_files_only: bool,
        allow_patterns: list[str],
        ignore_patterns: list[str] | None,
    ) -> str:
        assert repository == "owner/small-GGUF"
        wanted = filter_repo_objects(REPOSITORY, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for name in wanted:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
            downloaded.append(name)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return downloaded


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("Q4_K_M", ["Small-Q4_K_M.gguf"]),
        ("q4_k_m", ["Small-Q4_K_M.gguf"]),
        ("Q8_0", ["other/small.q8_0.gguf"]),
        ("F16", ["Small-F16.gguf"]),
        ("BF16", ["BF16/Small-BF16-00001-of-00002.gguf", "BF16/Small-BF16-00002-of-00002.gguf"]),
        ("UD-Q4_K_XL", ["Small-UD-Q4_K_XL.gguf"]),
    ],
)
def test_one_type_is_fetched(asked: list[str], tmp_path: Path, kind: str, files: list[str]) -> None:
    """Only files of the type are downloaded, however it is spelled; a model in parts is found by its first."""
    assert fetch(f"owner/small-GGUF:{kind}") == tmp_path / files[0]
    assert asked == files


def test_types_that_do_not_name_one_model(asked: list[str], tmp_path: Path) -> None:
    """A type that no file has, or several have, is refused; an image encoder downloaded earlier is not a model."""
    with pytest.raises(HubError, match=r"^no GGUF file is of type Q5_K_M$"):
        fetch("owner/small-GGUF:Q5_K_M")
    with pytest.raises(
        HubError, match=r"several GGUF files are of type Q4_K_XL: Small-Q4_K_XL\.gguf, Small-UD-Q4_K_XL"
    ):
        fetch("owner/small-GGUF:Q4_K_XL")
    (tmp_path / "mmproj-F16.gguf").touch()
    assert fetch("owner/small-GGUF:F16") == tmp_path / "Small-F16.gguf"


def test_without_a_type(asked: list[str], tmp_path: Path) -> None:
    """A repository's configuration and safetensors are fetched; one that has only GGUF is refused with what to name."""
    assert fetch("owner/small-GGUF") == tmp_path
    assert asked == ["config.json"]
    (tmp_path / "config.json").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(tmp_path))
        with pytest.raises(CheckpointError, match=r"'owner/small-GGUF' .*has no config\.json; .*owner/name:Q4_K_M"):
            resolve("owner/small-GGUF")


@pytest.mark.parametrize(
    "model", ["demo", "owner/name/file", "owner/name:", "owner/name:a/b", "owner:Q4_0", "o/n:Q4\n"]
)
def test_other_names(model: str) -> None:
    """A name that does not have the form of a hub id is refused."""
    assert not is_hub_id(model)
    with pytest.raises(HubError, match="must have the form owner/name"):
        fetch(model)
