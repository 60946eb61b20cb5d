"""Every command and example of the documents is run, checked or listed with a reason, as it stands on its page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quipu.web.cli.cli import main as quipu
from tests.e2e.servers import Server, serving
from tests.examples.page_benchmarks import benchmarks, parts_of
from tests.examples.page_blocks import PAGES, ROOT, Block, blocks_of, code_in_sentences, has_indented_code
from tests.examples.page_make import check_repository_has, make_calls_of, quipu_in, would_run
from tests.examples.page_parsing import NotAsDocumentedError, check_flags_exist, parse, parse_module
from tests.examples.page_programs import NOT_RUN, OTHERS, Programs
from tests.examples.page_runner import APART, PageRunner, apart_reason
from tests.examples.page_shell import Shell

FLAGS = ("--lora-modules", "pirate=demo-pirate", "sql=demo-pirate", "--response-store", "30d")
WITH_BLOCKS = [page for page in PAGES if any(blocks_of(page))]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("pages") / "server", "demo", *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    return server.get("/openapi.json").json()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(tmp_path_factory.mktemp("shell"), [*OTHERS, *NOT_RUN])
    yield shell
    shell.close()


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    """A folder as the repository is to someone who follows a page, with the data of the server."""
    for name in ("docs", "deploy"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "data").symlink_to(server.log_path.with_suffix("") / "data")
    (tmp_path / "server.log").symlink_to(server.log_path)
    (tmp_path / ".codex").mkdir()  # Codex CLI makes it
    return tmp_path


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_page(page: str, server: Server, document: Any, shell: Shell, folder: Path) -> None:
    """Every block of a page works as it stands there, in order, on a server whose cache is empty at the start."""
    server.wait_at_rest()
    assert server.post("/reset_prefix_cache").is_success
    runner = PageRunner(Programs(server, document, shell.folder / "bin"), shell, folder)
    problems = {block.place: problem for block in blocks_of(page) if (problem := runner.run(block)) is not None}
    assert problems == {}


def test_make_knows_its_targets() -> None:
    """Whatever a page has make run, in a block or a sentence, is there, and takes the flags that the page gives it."""
    calls = make_calls_of(["CONTRIBUTING.md", *PAGES])
    check_repository_has([], would_run(sorted({word for call in calls for word in call if "=" not in word})))
    for call in calls:
        if any("=" in word for word in call):
            commands = would_run(call)
            check_repository_has(call, commands)
            for argv in quipu_in(commands):
                parse(quipu, argv)


def refusal_of(line: str) -> str | None:
    """Return why a benchmark does not accept its flags."""
    try:
        parse_module(parts_of(line)[1])
    except NotAsDocumentedError as error:
        return str(error)
    return None


def test_benchmarks_accept_their_flags() -> None:
    """Each benchmark accepts what a page gives it, in a block or a sentence."""
    assert {line: why for line in benchmarks() if (why := refusal_of(line))} == {}
    assert refusal_of("python -m bench.sse --streams x") and refusal_of("python -m bench.no_such_module")


def test_commands_in_sentences_exist() -> None:
    """What a sentence or a table says of `quipu` is a command that exists, with flags that it has."""
    said = {code for page in PAGES for code in code_in_sentences(page) if code.startswith("quipu ")}
    assert {code: why for code in sorted(said) if (why := why_unknown(code))} == {}
    assert why_unknown("quipu no-such-command") and why_unknown("quipu usage --no-such-flag")


def why_unknown(code: str) -> str | None:
    try:
        check_flags_exist(code)
    except NotAsDocumentedError as error:
        return str(error)
    return None


SENDING = "curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d"
PLANTED = (
    ("bash", "quipu serve demo --no-such-flag"),
    ("bash", "quipu ledger verify [--no-such-flag]"),
    ("bash", "quipu ledger verify --data-dir nowhere"),
    ("bash", "make no-such-target"),
    ("bash", "make serve NO_SUCH_VARIABLE=1"),
    ("bash", 'make serve ARGS="--no-such-flag"'),
    ("bash", "make tests"),
    ("bash", 'make soak ARGS="--no-such-flag"'),
    ("bash", "python -m bench.no_such_module"),
    ("bash", "python -m tests.simulation"),
    ("bash", "python -m bench.sse --no-such-flag"),
    ("bash", "no-such-program"),
    ("bash", "curl http://127.0.0.1:8000/v1/no-such-path"),
    ("bash", f"""{SENDING} '{{"prompt": "A", "max_tokens": "x"}}'"""),
    ("bash", f"""{SENDING} '{{"prompt": "A", "no_such_field": 1'"""),
    ("bash", "prometheus --config.file deploy/no-such-file"),
    ("bash", "pip install './dist/quipu_llm-….whl[no_such_extra]'"),
    ("console", "quipu --version"),
    ("console", "$ quipu chat\n> Hello\nHello\nprompt 1 · cached 1 · computed 0\n"),
    ("console", "$ quipu chat\n> What is a quipu?\nNobody knows.\n...\n"),
    ("console", "$ quipu usage --by model\nmodel requests input cached hit rate written output price\n...\n"),
    ("console", "$ quipu ledger verify\nin order: 1 records\n"),
    (
        "console",
        "$ quipu explain req-...\nRequest req-... had 1 tokens in its prompt, all from the cache.\n...\n",
    ),
    ("console", "$ quipu ledger verify --data-dir nowhere\n"),
    ("bash", "quipu serve demo --max-model-len 1000000"),
    ("bash", "quipu serve --upstream http://127.0.0.1:1 --engines 0 --lora-modules a=adapters/a"),
    ("bash", "quipu audit http://127.0.0.1:8000 --model no-such-model"),
    ("bash", "quipu run-batch -i no-such-file -o results.jsonl"),
    ("bash", "quipu quantize MODEL OUT --format int8|no-such-format"),
    ("bash", "quipu quantize no-such-model OUT --format int8|w8a8"),
    ("bash", "quipu bench latency --no-such-flag"),
    ("bash", "quipu bench throughput --model no-such-model"),
    ("bash", "quipu doctor --no-such-flag\nquipu models [FOLDER …]"),
    ("console", "$ quipu doctor\nok       no_such_row 1\n"),
    ("bash", "quipu audit --compare no-such-report"),
    ("bash", "python3 -c 'raise LookupError'"),
    ("console", '$ curl http://127.0.0.1:8000/v1/models\n{"no_such_field": 1}\n'),
    ("python", "print(1)\n# 2\n"),
    ("python", "raise LookupError"),
    ("json", '{"no_such_field": 1}'),
    ("json", "{"),
    ("http", 'POST /v1/load_lora_adapter {"no_such_field": 1}'),
    ("http", "POST /v1/no-such-path {}"),
    ("toml", "[[keys]]\nno_such_field = 1\n"),
    ("text", "quipu serve --no-such-flag"),
    ("text", "> Hello"),
    ("text", "demo at http://127.0.0.1:8000\n\n...\nno_such_check    true"),
    ("text", "demo at http://127.0.0.1:8000\n\n...\n1 true, 2 wrong, 3 unknown, 4 not applicable; ..."),
    ("text", "prefix (chat): no such claim"),
    ("text", "quipu:no_such_metric 1"),
    ("ruby", "puts 1"),
)


@pytest.mark.parametrize(("language", "text"), PLANTED)
def test_wrong_examples_are_found(
    language: str, text: str, server: Server, document: Any, shell: Shell, folder: Path
) -> None:
    """What does not work, and what nobody runs, is found."""
    runner = PageRunner(Programs(server, document, shell.folder / "bin"), shell, folder)
    assert runner.run(Block("planted.md", 1, language, f"{text}\n")) is not None


@pytest.mark.parametrize("page", PAGES)
def test_code_is_fenced(page: str) -> None:
    """Code is in fences, which say its language: nothing else is run."""
    assert not has_indented_code(page)


def test_exceptions_exist() -> None:
    """Every block that is left out is on its page, and the tests that are said to run it exist."""
    left_out = {(block.page, begin) for page in PAGES for block in blocks_of(page) for begin in _begins(block)}
    assert left_out == set(APART)
    named = re.findall(r"tests/[\w/]+\.py", " ".join(APART.values()))
    assert [path for path in named if not (ROOT / path).is_file()] == []


def _begins(block: Block) -> Iterator[str]:
    if apart_reason(block):
        yield from (begin for page, begin in APART if page == block.page and block.text.startswith(begin))
