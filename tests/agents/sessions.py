"""What is done with each client in `make agents`, and how its server is started.

In sessions with an SDK, in `claude-code` and in `codex`, the demo model itself makes the call and the answer. It can
only read short prompts, so both command lines are configured to send little more than the question and a tool. In
`claude-code-unchanged` and `codex-unchanged` they send all of their own prompts and tools; there the server's fake
executor writes a call and an answer that are made up here (a scripted session).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from tests.runtimes import kept_library
from tests.tools.scripted_model import call, demo_folder

HERE = Path(__file__).parent
TOOL: dict[str, Any] = json.loads((HERE / "tool.json").read_text())
CLIENT_S = 120.0
ANSWER = "I have written the file."
FILE = "village.txt"
TEXT = "There is a river."
LONGER_CONTEXT = 49_152
"""Holds Claude Code's prompt of 19,500 tokens, but not the 32,000 tokens of output that it asks for as well."""

CODEX_CONFIG = """\
model = "demo"
model_provider = "quipu"
web_search = "disabled"
model_instructions_file = "{folder}/instructions.md"
include_permissions_instructions = false
include_environment_context = false
suppress_unstable_features_warning = true

[model_providers.quipu]
name = "quipu"
base_url = "{url}/v1"
wire_api = "responses"

# tools of a server with this name, and without the prefix `mcp__`, are shown to the model by their bare names
[mcp_servers.functions]
command = "node"
args = ["{clients}/tool_server.mjs", "{folder}/asked.jsonl"]
default_tools_approval_mode = "approve"

[features]
non_prefixed_mcp_tool_names = true
shell_tool = false
unified_exec = false
multi_agent = false
goals = false

[skills]
include_instructions = false
[skills.bundled]
enabled = false
"""


class SessionFailed(Exception):
    """A client did not do what its session is for."""


@attrs.frozen
class Place:
    """Where a session takes place: the server's address, the folder of npm's packages, an empty folder."""

    url: str
    clients: Path
    folder: Path


@attrs.frozen
class Session:
    """What to do with a client, and in a scripted session the call that the server writes, given the session's folder.

    `refusals`: parameters for which requests are refused as they must be, after which the client goes on.
    """

    drive: Callable[[Place], None]
    call: Callable[[Path], str] | None = None
    refusals: tuple[str, ...] = ()


def script(name: str) -> Callable[[Place], None]:
    """Return a function that runs NAME.mjs, which checks the answer itself."""

    def drive(place: Place) -> None:
        run_client(["node", str(place.clients / f"{name}.mjs")], place, {"QUIPU_URL": place.url})

    return drive


def claude_code(place: Place) -> None:
    """Have Claude Code call the tool."""
    short = {"MAX_THINKING_TOKENS": "0"}
    run_client(["node", str(place.clients / "claude_code.mjs")], place, claude_environment(place) | short)


def claude_code_unchanged(place: Place) -> None:
    """Have Claude Code write a file with its own tool and its own prompt."""
    flags = ["--model", "demo", "--permission-mode", "acceptEdits"]
    claude = str(place.clients / "node_modules/.bin/claude")
    check_file(run_client([claude, "-p", "Write it down.", *flags], place, claude_environment(place)), place)


def claude_environment(place: Place) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex(place: Place) -> None:
    """Have Codex call the tool."""
    home = place.folder / "codex"
    home.mkdir()
    (place.folder / "instructions.md").write_text("Use the tools where they help.")
    (home / "config.toml").write_text(CODEX_CONFIG.format(**attrs.asdict(place)))
    codex = str(place.clients / "node_modules/.bin/codex")
    told = run_client([codex, "exec", "--skip-git-repo-check", TOOL["question"]], place, {"CODEX_HOME": str(home)})
    asked = [json.loads(line) for line in (place.folder / "asked.jsonl").read_text().splitlines()]
    if asked != [TOOL["arguments"]] or told.strip() != TOOL["answer"]:
        raise SessionFailed(f"called with {asked}, and answered {told!r}")


def codex_unchanged(place: Place) -> None:
    """Have Codex write a file with its own tool and its own prompt."""
    home = place.folder / "codex"
    home.mkdir()
    provider = f'{{name="quipu", base_url="{place.url}/v1", wire_api="responses"}}'
    flags = ["-m", "demo", "-c", "model_provider=quipu", "-c", f"model_providers.quipu={provider}"]
    # its sandbox does not work in most containers
    flags += ["--skip-git-repo-check", "--sandbox", "danger-full-access"]
    codex = str(place.clients / "node_modules/.bin/codex")
    check_file(run_client([codex, "exec", *flags, "Write it down."], place, {"CODEX_HOME": str(home)}), place)


def check_file(told: str, place: Place) -> None:
    """Check that the file was written, and that the answer was printed."""
    written = place.folder / FILE
    if not written.is_file() or written.read_text().strip() != TEXT:
        raise SessionFailed(f"{FILE} was not written: {told!r}")
    if told.strip() != ANSWER:
        raise SessionFailed(f"not the answer: {told!r}")


def run_client(command: list[str], place: Place, environment: dict[str, str]) -> str:
    """Run a client whose home is the session's folder; return its output."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    done = subprocess.Popen(
        command,
        cwd=place.folder,
        env=kept | {"HOME": str(place.folder)} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        told, complaints = done.communicate(timeout=CLIENT_S)
    except subprocess.TimeoutExpired as error:
        done.kill()
        raise SessionFailed(f"not done after {CLIENT_S:.0f} s: {error.stdout!r} {error.stderr!r}") from error
    if done.returncode:
        raise SessionFailed(f"exit code {done.returncode}\n{told}\n{complaints}")
    return told


def write_with_claude_code(folder: Path) -> str:
    return call(json.dumps({"file_path": str(folder / FILE), "content": TEXT}), name="Write")


def write_with_codex(_: Path) -> str:
    return call(json.dumps({"cmd": f"echo '{TEXT}' > {FILE}"}), name="exec_command")


def scripted_flags(written: str, folder: Path) -> list[str]:
    """Return the arguments of `quipu serve` for a model that writes a call, and the answer once there is a result."""
    model = folder / "demo"
    shutil.copytree(demo_folder(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGER_CONTEXT}))
    (result,) = token_ids("<tool_response>")
    replies = folder / "replies.json"
    replies.write_text(json.dumps({-1: token_ids(written), result: token_ids(ANSWER)}))
    fake = ["--executor", "fake", "--fake-step-seconds", "0", "--fake-replies", str(replies)]
    return [str(model), "--served-model-name", "demo", *fake]


def token_ids(text: str) -> list[int]:
    ids = kept_library(demo_folder()).encode(text, max_tokens=1 << 20, add_special_tokens=False)
    assert not isinstance(ids, int)
    return list(ids)


SESSIONS = {
    "openai-chat": Session(script("chat")),
    "openai-responses": Session(script("responses")),
    # its tool runner asks for a conversation that the server keeps, and sends whole ones once it is refused
    "anthropic-messages": Session(script("messages"), refusals=("thread",)),
    "claude-code": Session(claude_code),
    "codex": Session(codex),
    # with each turn it asks for 32,000 tokens of output, and then for as many as the error says that there are
    "claude-code-unchanged": Session(claude_code_unchanged, write_with_claude_code, refusals=("max_tokens",) * 2),
    "codex-unchanged": Session(codex_unchanged, write_with_codex),
}

COMMAND_LINES = ("claude-code", "codex", "claude-code-unchanged", "codex-unchanged")
