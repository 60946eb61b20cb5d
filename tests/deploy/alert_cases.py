"""When each alert fires, and when not: cases for `promtool test rules`, which `python -m tests.deploy` runs.

A case has the series of a server, with a sample a minute in promtool's notation (`0+5x10` rises by 5 ten times), and
says for some times which alerts fire then; all others must be silent. The rules are tested without their annotations,
whose exact texts would otherwise stand in each case; `promtool check rules` expands those.
"""

from __future__ import annotations

from typing import Any

import attrs
import yaml

from tests.deploy.rules import RULES, read_rules

SERVER = {"job": "quipu", "instance": "a"}
MODEL = SERVER | {"model_name": "m"}
SERIES_OF_SERVERS = ("ledger_", "data_dir_", "usage_webhook_", "usage_records_", "response_", "log_", "trace_")
"""How the names of series begin that have no model..."""
ALERTS_OF_SERVERS = ("Down", "Ledger", "Disk", "UsageWebhook", "ResponseStore", "Log", "Trace")
"""...and those of alerts."""


@attrs.frozen
class Series:
    name: str
    values: str
    labels: dict[str, str]

    def text(self) -> dict[str, str]:
        labels = ",".join(f'{label}="{value}"' for label, value in self.labels.items())
        return {"series": f"{self.name}{{{labels}}}", "values": self.values}


@attrs.frozen
class Firing:
    alert: str
    labels: dict[str, str]


@attrs.frozen
class Case:
    what: str
    series: list[Series]
    firing: dict[str, list[Firing]]
    """By time: promtool's notation."""


def of(name: str, values: str, **labels: str) -> Series:
    """Return a series, whose name is given without `quipu:`."""
    if name == "up":
        return Series(name, values, SERVER | labels)
    common = SERVER if name.startswith(SERIES_OF_SERVERS) else MODEL
    return Series(f"quipu:{name}", values, common | labels)


def fires(alert: str, **labels: str) -> Firing:
    """Return an alert that fires, whose name is given without `Quipu`."""
    common = SERVER if alert.startswith(ALERTS_OF_SERVERS) else MODEL
    return Firing(f"Quipu{alert}", common | labels)


def delays(name: str, bounds: tuple[str, str, str], num_slow: int) -> list[Series]:
    """Return a histogram of 100 delays a minute: `num_slow` are in the third bucket, the others in the first."""
    counts = (100 - num_slow, 100 - num_slow, 100, 100)
    pairs = zip((*bounds, "+Inf"), counts, strict=True)
    return [of(f"{name}_bucket", f"0+{count}x200", le=bound) for bound, count in pairs]


QUEUE, LOOP = ("0.05", "10", "20"), ("0.05", "0.1", "0.25")
ENDED = "requests_total"
HEALTHY = [
    of("up", "1x200"),
    of("engines_desired", "2x200"),
    of("engines_ready", "2x200"),
    of("engine_deaths_total", "0x200"),
    of("actor_restarts_total", "0x200", actor="router"),
    of("upstream_ready", "1x200"),
    of("engine_steps_total", "0+600x200"),
    of(ENDED, "0+100x200", outcome="finished"),
    of(ENDED, "0+1x200", outcome="failed"),
    of(ENDED, "0+2x200", outcome="rejected"),
    *delays("request_queue_seconds", QUEUE, 0),
    *delays("event_loop_lag_seconds", LOOP, 0),
    of("usage_disputed_total", "0x200"),
    of("open_accounts", "4x200"),
    of("num_requests_running", "4x200"),
    of("num_requests_waiting", "1x200"),
    of("kv_blocks", "400x200", state="used"),
    of("kv_cache_usage_ratio", "0.5x200"),
    of("ledger_writable", "1x200"),
    of("ledger_database_up", "1x200"),
    of("ledger_unloaded_bytes", "50000x200"),
    of("data_dir_free_bytes", "50e9x200"),
    of("data_dir_size_bytes", "1e12x200"),
    of("usage_records_suppressed_total", "0x200", outcome="rejected"),
    of("usage_webhook_up", "1x200"),
    of("usage_webhook_delivered_total", "0+103x200"),
    of("usage_webhook_given_up_total", "0x200"),
    of("response_store_up", "1x200"),
    of("response_store_evicted_total", "0x200"),
    of("prefix_cache_queries_total", "0+9000x200"),
    of("prefix_cache_hits_total", "0+6000x200"),
    of("recomputed_tokens_total", "0+10x200"),
    of("prompt_tokens_total", "0+9000x200"),
    of("num_preemptions_total", "0+1x200"),
    of("kv_tier_corrupt_total", "0x200", tier="host"),
    of("kv_tier_failed_load_blocks_total", "0+1x200", tier="host", reason="late"),
    of("kv_tier_loaded_blocks_total", "0+500x200", tier="host"),
    of("log_lines_dropped_total", "0x200"),
    of("trace_spans_dropped_total", "0x200"),
]
CASES = [
    Case("all is well under load", HEALTHY, {"3h": []}),
    Case(
        "the server is gone for longer than a restart takes",
        [of("up", "1x10 0x20")],
        {"11m": [], "20m": [fires("Down")]},
    ),
    Case(
        "no engine is ready, and then only one of two",
        [of("engines_desired", "2x100"), of("engines_ready", "0x20 1x40")],
        {"4m": [], "20m": [fires("NoEngineReady")], "30m": [], "50m": [fires("EnginesMissing")]},
    ),
    Case(
        "an engine dies, later twice more, and then no more",
        [
            of("engine_deaths_total", "0x10 1x10 3x100", engine="0"),
            of("engine_deaths_total", "0x120", engine="1"),
        ],
        {
            "9m": [],
            "15m": [fires("EngineDied")],
            "30m": [fires("EngineDied"), fires("EngineKeepsDying")],
            "90m": [],
        },
    ),
    Case(
        "an actor is restarted, and an upstream is down",
        [of("actor_restarts_total", "0x10 1x40", actor="router"), of("upstream_ready", "1x10 0x40", engine="1")],
        {"9m": [], "20m": [fires("ActorRestarted", actor="router"), fires("UpstreamDown", engine="1")]},
    ),
    Case(
        "a tenth of the requests fails",
        [of(ENDED, "0+90x60", outcome="finished"), of(ENDED, "0+10x60", outcome="failed")],
        {"5m": [], "30m": [fires("RequestsFailing")]},
    ),
    Case("the only request of an hour fails", [of(ENDED, "0x20 1x40", outcome="failed")], {"22m": [], "30m": []}),
    Case(
        "a third of the requests is rejected",
        [of(ENDED, "0+60x60", outcome="finished"), of(ENDED, "0+30x60", outcome="rejected")],
        {"10m": [], "30m": [fires("RequestsRejected")]},
    ),
    Case(
        "two of a hundred requests wait too long, and the event loop is late as often",
        [*delays("request_queue_seconds", QUEUE, 2), *delays("event_loop_lag_seconds", LOOP, 2)],
        {"5m": [], "30m": [fires("QueueSlow"), fires("EventLoopLagging")]},
    ),
    Case(
        "an account is disputed; the alert ends after an hour",
        [of("usage_disputed_total", "0x10 1x120")],
        {"9m": [], "12m": [fires("UsageDisputed")], "80m": []},
    ),
    Case(
        "something is held although nothing has been computed for a while",
        [
            of("open_accounts", "1x60"),
            of("num_requests_running", "0x60"),
            of("num_requests_waiting", "0x60"),
            of("engines_ready", "1x60"),
            of("engine_steps_total", "0+600x10 6000x50"),
            of("kv_blocks", "3x60", state="used"),
            of("kv_blocks", "9x60", state="free"),
        ],
        {"15m": [], "45m": [fires("AccountsNotClosed"), fires("BlocksNotReleased")]},
    ),
    Case(
        "no record can be written, the database is away, and the disk is nearly full",
        [
            of("ledger_writable", "1x10 0x50"),
            of("ledger_database_up", "1x10 0x50"),
            of("ledger_unloaded_bytes", "1e3x10 1e8x50"),
            of("data_dir_free_bytes", "1e11x10 1e9x50"),
            of("data_dir_size_bytes", "1e12x60"),
        ],
        {
            "9m": [],
            "13m": [fires("LedgerNotWritable")],
            "40m": [
                fires(name) for name in ("LedgerNotWritable", "LedgerDatabaseDown", "LedgerBehind", "DiskNearlyFull")
            ],
        },
    ),
    Case(
        "the webhook refuses an event, and later takes none",
        [
            of("usage_webhook_up", "1x20 0x80"),
            of("usage_webhook_delivered_total", "0+100x20 2000x80"),
            of("usage_webhook_given_up_total", "0x5 1x95"),
            of("usage_records_suppressed_total", "0x100", outcome="rejected"),
            of(ENDED, "0+100x100", outcome="finished"),
        ],
        {
            "4m": [],
            "15m": [fires("UsageWebhookGivenUp")],
            "60m": [fires(f"UsageWebhook{what}") for what in ("Down", "Behind", "GivenUp")],
        },
    ),
    Case(
        "responses are deleted for room, and later cannot be stored",
        [of("response_store_up", "1x20 0x40"), of("response_store_evicted_total", "0x5 9x55")],
        {"4m": [], "50m": [fires("ResponseStoreDown"), fires("ResponseStoreFull")]},
    ),
    Case(
        "the hit ratio falls from two thirds to a tenth",
        [
            of("prefix_cache_queries_total", "0+9000x400"),
            of("prefix_cache_hits_total", "0+6000x200 1200000+900x200"),
        ],
        {"3h": [], "5h": [fires("CacheHitRatioDropped")]},
    ),
    Case(
        "the pool is full, and sequences are preempted",
        [
            of("kv_cache_usage_ratio", "0.99x60"),
            of("num_requests_waiting", "7x60"),
            of("recomputed_tokens_total", "0+500x60"),
            of("prompt_tokens_total", "0+2000x60"),
            of("num_preemptions_total", "0+3x60"),
        ],
        {"5m": [], "40m": [fires("KvPoolFull"), fires("Preempting")]},
    ),
    Case(
        "the pool is full, and nobody waits for it",
        [of("kv_cache_usage_ratio", "0.99x60"), of("num_requests_waiting", "0x60")],
        {"40m": []},
    ),
    Case(
        "a block of a tier is corrupt, and a quarter cannot be loaded",
        [
            of("kv_tier_corrupt_total", "0x10 1x50", tier="disk"),
            of("kv_tier_failed_load_blocks_total", "0+20x60", tier="disk", reason="late"),
            of("kv_tier_failed_load_blocks_total", "0+5x60", tier="disk", reason="failed"),
            of("kv_tier_loaded_blocks_total", "0+75x60", tier="disk"),
        ],
        {"9m": [], "40m": [fires("TierCorrupt", tier="disk"), fires("TierLoadsFailing", tier="disk")]},
    ),
    Case(
        "log lines and spans are dropped",
        [of("log_lines_dropped_total", "0x10 5x50"), of("trace_spans_dropped_total", "0x10 5x50")],
        {"9m": [], "20m": [fires("LogLinesDropped"), fires("TraceSpansDropped")]},
    ),
]


def rules_without_annotations() -> dict[str, Any]:
    rules: dict[str, Any] = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    return rules


def promtool_tests(rules_path: str) -> dict[str, Any]:
    """Return the file for `promtool test rules`, in which each case expects something of every alert."""
    alerts = {rule.name: rule.severity for rule in read_rules() if rule.is_alert}
    tests = []
    for case in CASES:
        checks = []
        for time, firing in case.firing.items():
            for alert, severity in alerts.items():
                expected = [{"exp_labels": one.labels | {"severity": severity}} for one in firing if one.alert == alert]
                checks.append({"eval_time": time, "alertname": alert, "exp_alerts": expected})
        series = [one.text() for one in case.series]
        tests.append({"name": case.what, "interval": "1m", "input_series": series, "alert_rule_test": checks})
    return {"rule_files": [rules_path], "evaluation_interval": "1m", "tests": tests}
