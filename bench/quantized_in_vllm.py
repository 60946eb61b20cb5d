"""Compare vLLM and quipu on what `quipu quantize` writes: the log probabilities of the same prompts, over HTTP.

    python -m bench.quantized_in_vllm [--model demo] [--formats w8a8 int4-g32 int4-g128] [--json] [--quick]

Each format is written once and served by both, in bfloat16, one after the other; prompts are paragraphs of the README,
with `echo` and `logprobs`. Both round what they compute to bfloat16, in other places, so log probabilities differ a
little; a reader that took a scale or a code for another would differ by whole units. vLLM has no kernel for 8-bit
weights with float activations (`int8`) on CPUs: its reader gets as far as that.

`--quick` compares quipu with itself, whether vLLM is installed or not.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from bench.http_load import COMPLETIONS, PATIENCE_S
from bench.peers.servers import MODEL, PEERS, ROOT, Peer, PeerFailed, Server
from quipu.kernels.checkpoints.rewritten_formats import FORMATS

MAX_CHARACTERS = 300
BY_NAME = {peer.name: peer for peer in PEERS}


def prompts() -> list[str]:
    """Return paragraphs of the README; in ASCII, since servers spell parts of other characters in different ways."""
    paragraphs = (ROOT / "README.md").read_text("utf-8").split("\n\n")
    return [text[:MAX_CHARACTERS] for text in paragraphs if len(text) > MAX_CHARACTERS // 2 and text.isascii()][:12]


def scores_of(peer: Peer, model: Path, texts: list[str]) -> list[dict[str, Any]]:
    """Serve a checkpoint, and return what the server says of each prompt's tokens. Raises PeerFailed and OSError."""
    with tempfile.TemporaryDirectory() as logs:
        server = Server(peer, model, Path(logs) / "log")
        try:
            server.wait()
            return [_score(server.port, text) for text in texts]
        finally:
            server.stop()


def _score(port: int, text: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{COMPLETIONS}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        logprobs: dict[str, Any] = json.load(response)["choices"][0]["logprobs"]
    return logprobs


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, float]:
    """Return how far apart the log probabilities are; the last token was drawn, and the first has none."""
    differences, num_same = [], 0
    for mine, other in zip(ours, theirs, strict=True):
        if mine["tokens"][:-1] != other["tokens"][:-1]:
            raise ValueError("the two servers read a prompt as other tokens")
        for at in range(1, len(mine["tokens"]) - 1):
            differences.append(abs(mine["token_logprobs"][at] - other["token_logprobs"][at]))
            num_same += _likeliest(mine, at) == _likeliest(other, at)
    return {
        "tokens": len(differences),
        "mean_difference": sum(differences) / len(differences),
        "largest_difference": max(differences),
        "same_argmax": num_same / len(differences),
    }


def _likeliest(logprobs: dict[str, Any], at: int) -> str:
    top: dict[str, float] = logprobs["top_logprobs"][at]
    return max(top, key=lambda token: top[token])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.quantized_in_vllm")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--formats", nargs="*", choices=list(FORMATS), default=["w8a8", "int4-g32", "int4-g128"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="smoke test: one format, one prompt, quipu itself")
    arguments = parser.parse_args()
    peer, texts, formats = BY_NAME["vllm"], prompts(), arguments.formats
    if arguments.quick:
        peer, texts, formats = BY_NAME["quipu"], texts[:1], formats[:1]
    elif not peer.is_installed():
        sys.exit(f"vLLM is not installed: {peer.install}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for written in formats:
            out = Path(folder) / written
            command = [sys.executable, "-m", "quipu.web.cli.cli", "quantize", arguments.model, str(out)]
            subprocess.run([*command, "--format", written], check=True, stdout=subprocess.DEVNULL)
            try:
                numbers = compare(scores_of(BY_NAME["quipu"], out, texts), scores_of(peer, out, texts))
            except PeerFailed as error:
                print(f"{written}: {error}", file=sys.stderr)
                continue
            rows += [{"name": f"{written}_{name}", "value": value, "unit": ""} for name, value in numbers.items()]
            if not arguments.json:
                print(f"{written:10}", *(f"{name} {value:.4g}" for name, value in numbers.items()), sep="  ")
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
