"""`quipu audit` of quipu itself, over the real wire: everything is true."""

from __future__ import annotations

import json

from tests.e2e.servers import Server, run_quipu


def test_quipu_tells_the_truth(tiny: Server) -> None:
    """No check is false or in doubt, but for times, which depend on the machine; the counters agree with clients."""
    flags = ("--api", "chat,messages", "--prompt-tokens", "100", "--metrics-url", f"{tiny.url}/metrics")
    ended = run_quipu("audit", tiny.url, "--json", *flags)
    assert (ended.returncode, ended.stderr) == (0, "")
    report = json.loads(ended.stdout)
    others = [finding for finding in report["findings"] if finding["verdict"] != "true" and finding["check"] != "time"]
    assert {(finding["check"], finding["verdict"]) for finding in others} == {
        ("key", "not applicable"),
        ("pressure", "not applicable"),
    }
    reasons = [finding["reason"] for finding in report["findings"] if finding["check"] == "blocks"]
    assert all(reason.startswith("blocks of ") for reason in reasons)
