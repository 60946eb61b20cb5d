"""Engine flags reach the engine's configuration and are shown by /server_info."""

from __future__ import annotations

import re

import pytest

from quipu.actors.config.runtime_config import SETTINGS
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.tokenizer.submission import root_key_of
from quipu.web.cli.cli import make_parser
from quipu.web.cli.serve_command import make_parser as serve_parser
from quipu.web.cli.setting_flags import GROUPS
from quipu.web.cli.settings import resolve_config
from scripts.declared_tables import settings_table
from tests.tiny import TINY


@pytest.mark.parametrize(
    ("flags", "expected"), [([], True), (["--share-pending-prefixes"], True), (["--no-share-pending-prefixes"], False)]
)
def test_share_pending_prefixes(flags: list[str], expected: bool) -> None:
    """Sharing is on unless the operator turns it off."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.engine.share_pending_prefixes is expected
    assert info.settings["share_pending_prefixes"] is expected


@pytest.mark.parametrize(("flags", "expected"), [([], 0.5), (["--max-pinned-share", "0"], 0.0)])
def test_max_pinned_share(flags: list[str], expected: float) -> None:
    """Half of the blocks may be pinned unless configured otherwise."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.engine.max_pinned_share == info.settings["max_pinned_share"] == expected


@pytest.mark.parametrize(
    ("flags", "requests", "tokens", "share"),
    [
        ([], 1024, 4 * 256 * 2048, 1.0),
        (["--max-num-seqs", "1000"], 4000, 4000 * 2048, 1.0),
        (["--max-num-seqs", "1", "--max-model-len", "4096"], 1024, 8 * 4096, 1.0),
        (["--max-waiting-requests", "0", "--max-waiting-tokens", "0"], 0, 0, 1.0),
        (["--max-waiting-requests", "7", "--max-waiting-tokens", "9", "--key-file", "keys.toml"], 7, 9, 0.5),
    ],
)
def test_limits_on_waiting(flags: list[str], requests: int, tokens: int, share: float) -> None:
    """Waiting is limited unless the limit is 0; with a key file, which may have several tenants, one tenant may use
    half."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    engine = config.engine
    assert (engine.max_waiting_requests, engine.max_waiting_tokens, engine.max_waiting_share) == (
        requests,
        tokens,
        share,
    )
    names = ("max_waiting_requests", "max_waiting_tokens", "max_waiting_share")
    assert tuple(info.settings[name] for name in names) == (requests, tokens, share)


@pytest.mark.parametrize(("flags", "expected"), [([], 300.0), (["--step-timeout", "0"], 0.0)])
def test_step_timeout(flags: list[str], expected: float) -> None:
    """The default is long enough for compiling kernels."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.step_timeout_s == info.settings["step_timeout"] == expected


@pytest.mark.parametrize("share", ["-0.1", "1.5", "half", "nan"])
def test_invalid_share(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the flag."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "demo", "--max-pinned-share", share])
    assert "--max-pinned-share" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--port", "http", "a whole number"),
        ("--max-model-len", "32kB", "must be a whole number, not '32kB'"),
        ("--max-waiting-tokens", "1.5", "a whole number"),
        ("--max-pinned-share", "half", "must be a number, not 'half'"),
        ("--ledger-retention-days", "ever", "must be a number"),
        ("--request-timeout", "nan", "must be greater than 0, not nan"),
        ("--request-timeout", "0", "greater than 0"),
        ("--request-timeout", "-1", "greater than 0"),
        ("--shutdown-timeout", "nan", "at least 0"),
        ("--step-timeout", "-1", "must be at least 0, not -1"),
        ("--shutdown-timeout", "-1", "at least 0"),
        ("--shutdown-timeout", "soon", "a number"),
        ("--max-waiting-tokens", str(1 << 63), f"must be at most {(1 << 63) - 1}, not 9"),
        ("--max-waiting-tokens", "9" * 20 + "k", f"must be at most {(1 << 63) - 1}, not 9"),
        ("--max-waiting-tokens", "9" * 400 + "k", "a whole number"),
        ("--port", "9" * 4000, "between 0 and 65535"),
        ("--max-idempotency-keys", str(1 << 63), f"must be at most {(1 << 63) - 1}, not 9"),
        ("--ledger-segment-bytes", "many", "a whole number"),
        ("--file-ttl", "inf", "must be greater than 0 and at most 36500, not inf"),
        ("--chat-template-timeout", "inf", "must be greater than 0 and at most 3600, not inf"),
        ("--speculative-kv-cost", "inf", "must be between 0 and 1000000000, not inf"),
    ],
)
def test_invalid_numbers(flag: str, text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the flag and what is wrong with its value, before anything starts."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "demo", f"{flag}={text}"])
    stderr = capsys.readouterr().err
    assert f"argument {flag}: " in stderr and words in stderr


@pytest.mark.parametrize(
    "flag",
    [
        *("--link-tls-cert", "--link-tls-key", "--link-tls-ca", "--kv-disk", "--kv-remote-encrypt", "--draft-model"),
        *("--served-model-name", "--lora-dir", "--generation-config", "--data-dir", "--tool-call-parser"),
    ],
)
def test_empty_texts(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag whose value is empty, as that of a variable that is not set, is neither ignored nor the current folder."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "demo", f"{flag}="])
    assert f"argument {flag}: must " in capsys.readouterr().err


def test_valid_times() -> None:
    """Stopping at once and waiting forever are both valid."""
    arguments = make_parser().parse_args(["serve", "--shutdown-timeout", "0", "--request-timeout", "0.5"])
    assert (arguments.shutdown_timeout, arguments.request_timeout) == (0.0, 0.5)
    assert make_parser().parse_args(["serve", "--shutdown-timeout", "inf"]).shutdown_timeout == float("inf")


@pytest.mark.parametrize(("flags", "expected"), [([], 5.0), (["--chat-template-timeout", "0.5"], 0.5)])
def test_chat_template_timeout(flags: list[str], expected: float) -> None:
    """The default is five seconds."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.chat_template_timeout_s == info.settings["chat_template_timeout"] == expected


def root_key_with(*flags: str) -> bytes:
    """Return the key that the same request's blocks start from, on a server with these flags."""
    config, _ = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    request = Encode(
        request_id="r", prompts=(), num_choices=1, max_tokens=1, sampling=SamplingParams(max_tokens=1), stop=(),
        include_stop=False, skip_special_tokens=True, domain="d", prompt_param="prompt", max_tokens_param="max_tokens",
    )  # fmt: skip
    return root_key_of(request, config)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "bfloat16"),
        (["--dtype", "float32"], "float32"),
        (["--dtype", "float32", "--kv-cache-dtype", "bfloat16"], "bfloat16"),
        (["--kv-cache-dtype", "int8"], "int8"),
    ],
)
def test_kv_cache_dtype(flags: list[str], expected: str) -> None:
    """The KV cache has the weights' dtype unless configured otherwise; `auto` is resolved."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.kv_dtype == config.engine.kv_cache_dtype == info.settings["kv_cache_dtype"] == expected


def test_kv_cache_dtype_is_in_block_keys() -> None:
    """Servers share keys of blocks if their caches have the same dtype, however that was chosen, and only then."""
    default = root_key_with()
    assert default == root_key_with("--kv-cache-dtype", "auto") == root_key_with("--kv-cache-dtype", "bfloat16")
    others = [root_key_with("--kv-cache-dtype", dtype) for dtype in ("int8", "float16", "float32")]
    assert len({default, *others}) == 4
    assert root_key_with("--dtype", "float32") == others[2]


def test_unknown_kv_cache_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the flag, the value and what is supported."""
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "demo", "--kv-cache-dtype", "fp8"])
    stderr = capsys.readouterr().err
    assert "--kv-cache-dtype" in stderr and "fp8" in stderr and "int8" in stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [([], 16), (["--executor", "vllm"], 32), (["--executor", "vllm", "--block-size", "64"], 64)],
)
def test_block_size(flags: list[str], expected: int) -> None:
    """The default is what the executor's attention takes."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.engine.block_size == info.block_size == info.settings["block_size"] == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "suffix"),
        (["--executor", "cpu"], "suffix"),
        (["--executor", "triton"], "suffix"),
        (["--speculative", "ngram"], "ngram"),
        (["--speculative", "off"], "off"),
        (["--executor", "fake"], "off"),
        (["--executor", "fake", "--speculative", "ngram"], "ngram"),
        (["--executor", "vllm"], "off"),
        (["--executor", "transformers"], "off"),
        (["--executor", "reference"], "off"),
        (["--task", "embed"], "off"),
    ],
)
def test_speculative(flags: list[str], expected: str) -> None:
    """Tokens are guessed by our kernels, if there is an output; a flag is taken at its word."""
    config, info = resolve_config(make_parser().parse_args(["serve", str(TINY), *flags]))
    assert config.engine.speculative == info.settings["speculative"] == expected


def test_settings_stand_under_their_title() -> None:
    """`quipu serve --help` has each setting under the title of its group, and the documents' tables the same titles."""
    _, *sections = re.split(r"^(\S.*):$", serve_parser().format_help(), flags=re.MULTILINE)
    found = dict(zip(sections[::2], sections[1::2], strict=True))
    shown = [setting for setting in SETTINGS if setting.help]
    assert [
        s.flags[0] for s in shown if not re.search(rf"^  {s.flags[0]}\b", found[GROUPS[s.group]], re.MULTILINE)
    ] == []
    assert re.findall(r"^## (.*)", settings_table(), re.MULTILINE) == [
        title[0].upper() + title[1:] for title in dict.fromkeys(GROUPS.values())
    ]
