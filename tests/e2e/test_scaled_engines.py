"""Engine processes come and go with the load, and every client has its answer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.e2e.engine_list import list_engines, wait_all_ready
from tests.e2e.servers import eventually, serving

FLAGS = [
    "--executor", "fake", "--fake-step-seconds", "0.04", "--num-blocks", "400", "--max-num-seqs", "2",
    "--max-engines", "2", "--scale-up-after", "0.6", "--scale-down-after", "0.6",
]  # fmt: skip
NUM_CLIENTS = 8
TOKENS = 20


def test_second_engine_comes_and_goes(tmp_path: Path) -> None:
    """A second process serves while work waits, and ends afterwards; nothing that it served failed."""
    with serving(tmp_path, *FLAGS) as server, ThreadPoolExecutor(NUM_CLIENTS) as pool:
        wait_all_ready(server, 1)
        is_over = False

        def ask_on(index: int) -> int:
            number = 0
            while not is_over:
                body = {"prompt": [index + 1, number + 1] * 20, "max_tokens": TOKENS, "ignore_eos": True}
                answer = server.post("/v1/completions", {"model": "demo", **body})
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == TOKENS
                number += 1
            return number

        asked = [pool.submit(ask_on, index) for index in range(NUM_CLIENTS)]
        wait_all_ready(server, 2)
        eventually(lambda: list_engines(server)[1]["num_running"], "the second one has something to do")
        is_over = True
        assert all(each.result() for each in asked)
        eventually(lambda: len(list_engines(server)) == 1, "the second one has gone")
        eventually(lambda: len(server.engines()) == 1, "and its process with it")
        assert server.metrics()['engine_scalings_total{direction="up"}'] == 1
        log = server.log_path.read_text()
        assert log.count("engine.scaled_up") == log.count("engine.scaled_down") == 1
