"""nginx and HAProxy in front of a real server, with the configurations of `deploy/` as they are.

Only addresses, certificates and sockets are replaced. What is checked for each: HTTP/2 and TLS, streams that are passed
on as they are made, clients that leave, connections that are used again, bodies up to quipu's own limit, and that a
request is known to come from elsewhere.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import trustme

from tests.deploy.checks import Failed, program, run, running
from tests.e2e.servers import Server, serving
from tests.processes import PATIENCE_S, eventually

ROOT = Path(__file__).resolve().parents[2]
NGINX, HAPROXY = ROOT / "deploy" / "nginx.conf", ROOT / "deploy" / "haproxy.cfg"
ENDLESS = 16_000
"""More output tokens than a check waits for."""
MOST_STEPS = 8
"""Steps of 0.2 seconds that may pass until a client sees the first token; a buffer of 4 KiB holds two dozen tokens."""
MIB = 1 << 20


@attrs.frozen
class Proxy:
    url: str
    certificates: Path
    """Those of the authority that signed the proxy's."""

    def body(self, max_tokens: int, *, stream: bool = False) -> dict[str, Any]:
        return {"model": "demo", "prompt": [5] * 40, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=str(self.certificates), timeout=PATIENCE_S)

    def curl(self, *arguments: str) -> list[str]:
        """Return the command of curl for HTTP/2."""
        return [program("curl", "curl"), "--silent", "--http2", "--cacert", str(self.certificates), *arguments]


def check_nginx(folder: Path) -> str:
    nginx = program("nginx", "nginx")
    with _served(folder) as server:
        proxy = _certified(folder)
        text = _replaced(
            NGINX.read_text(),
            ("server 127.0.0.1:8000", f"server {server.address[0]}:{server.address[1]}"),
            ("listen 443 ", f"listen {proxy.url.removeprefix('https://').replace('localhost', '127.0.0.1')} "),
            ("server_name quipu.example.com", "server_name localhost"),
            ("/etc/nginx/quipu.crt", f"{folder}/proxy.pem"),
            ("/etc/nginx/quipu.key", f"{folder}/proxy.pem"),
        )
        places = "".join(
            f"{kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        whole = (
            f"user root;\npid {folder}/pid;\ndaemon off;\nevents {{}}\nhttp {{\naccess_log off;\n{places}\n{text}}}\n"
        )
        (folder / "nginx.conf").write_text(whole)
        command = [nginx, "-e", f"{folder}/errors", "-p", str(folder), "-c", f"{folder}/nginx.conf"]
        run(*command, "-t")
        with running(*command, log_path=folder / "proxy.log"):
            return _check(proxy, server)


def check_haproxy(folder: Path) -> str:
    haproxy = program("haproxy", "haproxy")
    with _served(folder) as server:
        proxy = _certified(folder)
        text = _replaced(
            HAPROXY.read_text(),
            ("quipu-1 127.0.0.1:8000", f"quipu-1 {server.address[0]}:{server.address[1]}"),
            ("bind :443 ", f"bind {proxy.url.removeprefix('https://').replace('localhost', '127.0.0.1')} "),
            ("/etc/haproxy/quipu.pem", f"{folder}/proxy.pem"),
            ("/run/haproxy/admin.sock", f"{folder}/admin.sock"),
            ("log /dev/log local0", "log stderr format raw local0"),
        )
        (folder / "haproxy.cfg").write_text(text)
        command = [haproxy, "-db", "-f", f"{folder}/haproxy.cfg"]
        run(*command, "-c")
        with running(*command, log_path=folder / "proxy.log"):
            eventually(lambda: _is_up(folder / "admin.sock"), "HAProxy's check of /ready succeeds")
            return _check(proxy, server)


def _check(proxy: Proxy, server: Server) -> str:
    eventually(lambda: _answers(proxy), "the proxy answers")
    _check_http2_stream(proxy, server)
    _check_clients_that_leave(proxy, server)
    _check_connections_are_kept(proxy, server)
    _check_bodies(proxy)
    _check_origin(proxy, server)
    metrics = server.wait_at_rest()
    if metrics["usage_disputed_total"]:
        raise Failed("an account is disputed")
    return "HTTP/2, streams, clients that leave, kept connections, bodies, origin"


@contextmanager
def _served(folder: Path) -> Iterator[Server]:
    flags = ["--executor", "fake", "--fake-step-seconds", "0.2", "--num-blocks", "1200"]
    with serving(folder / "served", *flags) as server:
        yield server


def _certified(folder: Path) -> Proxy:
    """Return a proxy's address at a free port, with a certificate in the folder."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(folder / "proxy.pem")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return Proxy(f"https://localhost:{listener.getsockname()[1]}", folder / "authority.pem")


def _replaced(text: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    return text


def _answers(proxy: Proxy) -> bool:
    try:
        with proxy.client() as client:
            return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def _is_up(path: Path) -> bool:
    """Return whether HAProxy's own statistics say that its check of the server got a 200."""
    with socket.socket(socket.AF_UNIX) as admin:
        try:
            admin.connect(str(path))
        except OSError:
            return False
        admin.sendall(b"show stat\n")
        said = b"".join(iter(lambda: admin.recv(65536), b"")).decode()
    return any(line.startswith("quipu,quipu-1,") and ",L7OK,200," in line for line in said.splitlines())


def _check_http2_stream(proxy: Proxy, server: Server) -> None:
    """A stream over HTTP/2 is not compressed, and its first token arrives before the server has made many others."""
    before = server.metrics()["engine_steps_total"]
    body = json.dumps(proxy.body(ENDLESS, stream=True))
    command = proxy.curl("--no-buffer", "--include", "--compressed", "--data", body, f"{proxy.url}/v1/completions")
    with subprocess.Popen([*command, "-H", "Content-Type: application/json"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            if (status := process.stdout.readline()) != b"HTTP/2 200 \r\n":
                raise Failed(f"the answer begins with {status!r}")
            headers = [name.lower() for name in iter(process.stdout.readline, b"\r\n")]
            if any(header.startswith(b"content-encoding") for header in headers):
                raise Failed("the stream is compressed")
            first = next(line for line in process.stdout if line.startswith(b"data: "))
            if not json.loads(first[6:])["choices"]:
                raise Failed(f"the first event is {first!r}")
            _check_few_steps(server, before)
        finally:
            process.kill()
    server.wait_at_rest()


def _check_clients_that_leave(proxy: Proxy, server: Server) -> None:
    """A client that leaves ends its request, whether its answer has begun or not, over HTTP/1.1 and HTTP/2."""
    metrics = server.metrics()
    ended, before = metrics['requests_total{outcome="cancelled"}'], metrics["engine_steps_total"]
    with proxy.client() as client:
        with client.stream("POST", "/v1/completions", json=proxy.body(ENDLESS, stream=True)) as stream:
            next(stream.iter_lines())
            _check_few_steps(server, before)
    server.wait_at_rest()
    body = json.dumps(proxy.body(ENDLESS))
    for version in ("--http1.1", "--http2"):
        command = proxy.curl(version, "--data", body, f"{proxy.url}/v1/completions")
        with subprocess.Popen([*command, "-H", "Content-Type: application/json"]) as process:
            eventually(lambda: server.metrics()["num_requests_running"] == 1, "the request runs")
            process.kill()
        server.wait_at_rest()
    if (now := server.metrics()['requests_total{outcome="cancelled"}']) != ended + 3:
        raise Failed(f"{now - ended} of 3 requests were cancelled")


def _check_few_steps(server: Server, before: float) -> None:
    if (num_steps := server.metrics()["engine_steps_total"] - before) > MOST_STEPS:
        raise Failed(f"the first token arrived after {num_steps:g} steps")


def _check_connections_are_kept(proxy: Proxy, server: Server) -> None:
    """Requests of one client reach the server over one connection."""

    def ask_twice() -> bool:
        """(The connection may be closed between two requests if this machine is slow.)"""
        with proxy.client() as client:
            client.post("/v1/completions", json=proxy.body(1)).raise_for_status()
            before = _connections_to(server)
            client.post("/v1/completions", json=proxy.body(1)).raise_for_status()
            return bool(before) and _connections_to(server) == before

    eventually(ask_twice, "a second request takes the connection of the first")


def _connections_to(server: Server) -> set[str]:
    """Return the local addresses of established connections to the server."""
    port, established = f":{server.address[1]:04X}", "01"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[2].endswith(port) and row[3] == established}


def _check_bodies(proxy: Proxy) -> None:
    """Bodies reach the server whatever their size, and the server says which one is too large, in the API's shape."""
    with proxy.client() as client:
        for num_mib, status in ((6, 400), (9, 413)):
            prompt = "word " * (num_mib * MIB // 5)
            answer = client.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
            if answer.status_code != status or "error" not in answer.json():
                raise Failed(f"{num_mib} MiB: {answer.status_code} {answer.text[:200]}")


def _check_origin(proxy: Proxy, server: Server) -> None:
    """The server knows that a request is not from its own machine, and which host a page came from."""
    with proxy.client() as client:
        answer = client.post("/reset_prefix_cache")
        if answer.status_code != 403 or answer.json()["error"]["code"] != "local_only":
            raise Failed(f"a route for this machine alone: {answer.status_code} {answer.text[:200]}")
        for origin, status in ((proxy.url, 200), ("https://elsewhere.example", 403)):
            got = client.get("/v1/models", headers={"Origin": origin}).status_code
            if got != status:
                raise Failed(f"a page of {origin} gets {got}")
        if (got := client.get("/metrics").status_code) != 404:
            raise Failed(f"/metrics: {got}")
    if server.post("/reset_prefix_cache").status_code != 200:
        raise Failed("the server's own machine is refused")


def seconds(text: str, directive: str) -> float:
    """Return the time that a configuration gives a directive, in seconds."""
    found = re.search(rf"^\s*{re.escape(directive)}\s+(\d+)(ms|s|m|h)", text, flags=re.M)
    assert found is not None, directive
    return float(found[1]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[found[2]]
