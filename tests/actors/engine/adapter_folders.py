"""Folders that the fake executor takes for adapters: it reads their bytes, and computes with their digests."""

from __future__ import annotations

import json
from pathlib import Path


def make_folder(folder: Path, text: str = "one") -> Path:
    """Make an adapter whose digest is that of `text`, or change one."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "text": text}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder
