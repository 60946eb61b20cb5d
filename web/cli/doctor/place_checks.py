"""Checks of what a server would use: packages, its port, the data directory, file descriptors, and the hub's cache."""

from __future__ import annotations

import errno
import os
import platform
import resource
import shutil
import socket
import tempfile
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

import quipu
from quipu.actors.ledger.folder import LedgerFolder

from .findings import Finding, Verdict

PACKAGE = "quipu-llm"
NEEDED_FILES = 1024
"""File descriptors: each connection takes one or two."""
LITTLE_SPACE = 1 << 30
NEWEST_PYTHON = (3, 13)
"""The newest that was tried."""


def check_python(version: tuple[int, int] | None = None) -> Finding:
    found = tuple(map(int, platform.python_version_tuple()[:2])) if version is None else version
    text = f"{platform.python_version()}; quipu {quipu.__version__}"
    if found > NEWEST_PYTHON:
        return Finding("python", text, Verdict.WARNING, "quipu was not tried on it: use 3.11, 3.12 or 3.13")
    return Finding("python", text)


def check_packages(package: str = PACKAGE) -> Finding:
    """Find whether what is installed lies within the bounds that the package states."""
    try:
        stated = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return Finding("packages", f"{package} is not installed", Verdict.WARNING, "run `make install`")
    applying = [requirement for requirement in map(Requirement, stated) if _applies(requirement)]
    wrong = [text for text in map(_why_wrong, applying) if text]
    if wrong:
        return Finding("packages", "; ".join(wrong), Verdict.PROBLEM, "run `make install`, or pip with the same wheel")
    return Finding("packages", f"{len(applying)}, all within their bounds")


def _applies(requirement: Requirement) -> bool:
    """Return whether a dependency is one without extras."""
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _why_wrong(wanted: Requirement) -> str:
    """Return what is wrong with one dependency, or an empty string."""
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted.name} is missing"
    return (
        ""
        if wanted.specifier.contains(found, prereleases=True)
        else f"{wanted.name} is {found}, not {wanted.specifier}"
    )


def check_port(host: str, port: int) -> Finding:
    """Find whether a server could listen here."""
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = "another program listens there, perhaps a server that runs already: pass --port"
            return Finding("port", f"{where} is in use", Verdict.WARNING, advice)
        advice = "pass another --host or --port"
        return Finding("port", f"{where} cannot be used: {error.strerror or error}", Verdict.PROBLEM, advice)
    return Finding("port", f"{where} is free")


def check_data_dir(folder: Path) -> Finding:
    """Find whether usage records can be kept here. Nothing is left in the folder."""
    shown = str(folder)
    if folder.exists() and LedgerFolder(folder).is_in_use:
        return Finding(
            "data", f"{shown} belongs to a server that runs", Verdict.OK, "another one needs its own --data-dir"
        )
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            free = shutil.disk_usage(nearest).free
    except OSError as error:
        advice = "pass a --data-dir that this user may write to"
        return Finding("data", f"{shown} cannot be written: {error.strerror}", Verdict.PROBLEM, advice)
    text = f"{shown} {'exists' if folder.exists() else 'will be made'}, {free / 1e9:.1f} GB free"
    if free < LITTLE_SPACE:
        return Finding("data", text, Verdict.WARNING, "usage records need room: a server refuses requests without it")
    return Finding("data", text)


def check_files() -> Finding:
    """Find how many file descriptors a server may have: it raises its limit to the hard one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "no limit" if most == resource.RLIM_INFINITY else f"{most} descriptors"
    if most != resource.RLIM_INFINITY and most < NEEDED_FILES:
        return Finding(
            "files", text, Verdict.WARNING, f"raise the limit (`ulimit -Hn {NEEDED_FILES}`) for more clients"
        )
    return Finding("files", text)


def check_hub_cache(folder: Path) -> Finding:
    """Find whether models can be downloaded to the hub's cache."""
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    if not os.access(nearest, os.W_OK):
        return Finding("models", f"{folder} cannot be written", Verdict.WARNING, "set HF_HOME, or serve a local folder")
    free = shutil.disk_usage(nearest).free
    return Finding("models", f"{folder}, {free / 1e9:.1f} GB free (`quipu models` lists them)")
