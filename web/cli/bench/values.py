"""Parsers of flag values. They raise ArgumentTypeError."""

from __future__ import annotations

import argparse
import math
from typing import Any

import orjson

from quipu.actors.config.declarations import Bounds

from ..server_flags import visible
from ..setting_flags import integer, number
from .report import METRICS

positive = integer(Bounds(minimum=1))
count = integer(Bounds(minimum=0))
rate = number(Bounds(above=0))


def header(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    visible(text)
    return name.strip(), value.strip()


def json_object(text: str) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"unknown metric {name!r} (one of {', '.join(METRICS)})")
    return names


def percentiles(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r}: percentiles must be from 0 to 100")
    return values


def finite(text: str) -> float:
    if not (value := rate(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not finite")
    return value


def ratio(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 0 and below 1")
    return value
