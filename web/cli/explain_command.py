"""`quipu explain`: what of a request's prompts was cached, why not more, and what could be changed.

Asks a running server, or reads a data directory or a database like `quipu usage`, which keep no blocks, messages and
advice. Both answers come from the endpoint's own function (`web/api/cache/explanation_json.py`). The result goes to
stdout; errors go to stderr, with exit code 1 for an unknown request, and 2 for everything else.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path

import httpx2
import orjson
from sqlalchemy.exc import SQLAlchemyError
from werkzeug.urls import iri_to_uri

from quipu.actors.accountant.explaining import explain_record
from quipu.actors.ledger.database import LedgerError, reason
from quipu.actors.ledger.reading import open_reader

from ..api.cache.explanation_json import Reader, explanation_pieces
from .command_output import EXIT_FAILED, EXIT_USAGE, complain, indented, print_result, printable
from .explanation_sentences import sentences
from .ledger_flags import URL_VARIABLE
from .one_line_parser import OneLineParser, folder
from .server_flags import KEY_VARIABLE, add_server_flags

PATIENCE_S = 30.0


class ExplainError(Exception):
    def __init__(self, message: str, code: int = EXIT_USAGE) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `explain`. Returns the exit code."""
    return run_explain(make_parser().parse_args(argv), os.environ)


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu explain", description="Explain what of a request's prompts was cached.")
    add = parser.add_argument
    add("request_id", metavar="REQUEST_ID", help="the server's own id, from X-Quipu-Request-Id")
    add_server_flags(add)
    add("--json", action="store_true", help="print everything that is known, as JSON")
    add("--data-dir", type=folder, metavar="FOLDER", help="read this data directory instead of asking a server")
    add("--ledger-url", metavar="URL", help=f"read this database instead; or, with --data-dir, set {URL_VARIABLE}")
    return parser


def run_explain(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run `quipu explain`; return the exit code."""
    try:
        if arguments.data_dir is None and arguments.ledger_url is None:
            key = arguments.api_key or environment.get(KEY_VARIABLE)
            answer = _ask(arguments.base_url, arguments.request_id, key)
        else:
            data_dir = None if arguments.data_dir is None else Path(arguments.data_dir)
            ledger_url = arguments.ledger_url or environment.get(URL_VARIABLE) or None
            answer = _read(arguments.request_id, data_dir, ledger_url)
        explanation = orjson.loads(answer)
    except ExplainError as error:
        return complain(error, error.code)
    except orjson.JSONDecodeError:
        return complain("the answer is not JSON")
    text = indented(explanation).decode().rstrip() if arguments.json else "\n".join(sentences(explanation))
    return print_result(text)


def _ask(base_url: str, request_id: str, key: str | None) -> bytes:
    """Return a server's answer. Raises ExplainError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    target = f"{base_url}/v1/cache/explain/{iri_to_uri(request_id.replace('/', '%2F'))}"
    try:
        with httpx2.Client(headers=headers, timeout=PATIENCE_S, trust_env=False) as http:
            response = http.get(target)
            content = response.content
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ExplainError(
            f"no answer from {base_url}: {str(error) or type(error).__name__}; name the server with --base-url, or its "
            "data directory with --data-dir"
        ) from error
    if response.status_code == HTTPStatus.OK:
        return content
    code = EXIT_FAILED if response.status_code == HTTPStatus.NOT_FOUND else EXIT_USAGE
    said = _message_of(content) or f"{base_url} answered {response.status_code}"
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        said += f" Set it with --api-key, or in the variable {KEY_VARIABLE}."
    raise ExplainError(said, code)


def _message_of(content: bytes) -> str | None:
    """Return the message of an error's body, if it has one."""
    try:
        return printable(str(orjson.loads(content)["error"]["message"]))
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None


def _read(request_id: str, data_dir: Path | None, ledger_url: str | None) -> bytes:
    """Return what the ledger's record says. Raises ExplainError."""
    try:
        with open_reader(data_dir=data_dir, url=ledger_url) as reader:
            found = reader.get(request_id)
    except (LedgerError, SQLAlchemyError, OSError) as error:
        raise ExplainError(reason(error)) from error
    if found is None:
        raise ExplainError("No record exists for this request id.", EXIT_FAILED)
    return b"".join(explanation_pieces(explain_record(found.record), Reader(None), 1))
