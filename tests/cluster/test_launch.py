"""`shoal serve` as a process: it answers, says what is wrong, and leaves nothing behind."""

import contextlib
import http.server
import io
import ipaddress
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from ray.serve._private.common import DeploymentStatusTrigger as Trigger
from ray.serve._private.common import ReplicaState
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
)
from rich.console import Console

from bench.replica import dummy_models
from cluster import joined, launch
from cluster.config import Config
from cluster.room import Shortage
from tests.certificates import Issued, elliptic
from tests.cluster.serving import END_S, START_S, running
from tests.deploy.streams import IMAGE, Clients, Stream

DRAIN_S = 5
STEP_S = 0.01


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(START_S)
def test_a_server_answers_and_ends_without_a_trace(
    tiny_model: Path, other_tiny_model: Path, tmp_path: Path, free_port: int
) -> None:
    """With two models, each with a replica, and one that is passed on: to this server itself."""
    url = f"http://127.0.0.1:{free_port}"
    models = [
        {"name": "tiny-llama", "model": str(tiny_model), "aliases": ["small"]},
        {"name": "org/other", "model": str(other_tiny_model), "context_length": 512},
        {"name": "far", "upstream": {"url": f"{url}/v1", "model": "small"}},
    ]
    config = tmp_path / "shoal.yaml"
    config.write_text(yaml.safe_dump({"replicas": 1, "kv_tokens": 4096, "routers": 2, "models": models}))

    def said(model: str) -> Any:
        body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        return answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.status_code

    with running("--config", str(config), "--port", str(free_port)) as server:
        assert server.wait_for("^Shoal serves tiny-llama, org/other, far at ").split()[-1] == f"{url}/v1"
        curl = server.wait_for("^ *curl ")
        server.wait_for("Ctrl-C")
        assert any(
            line.startswith("  tiny-llama: 1 replica on ") and "4,096 KV tokens" in line for line in server.lines
        )
        answer = subprocess.run(f"{curl} --silent --fail", shell=True, capture_output=True, text=True, timeout=30)
        assert answer.returncode == 0, answer.stderr
        ranks = [process for process in server.family() if "ray::Rank" in " ".join(process.cmdline())]
        assert len(ranks) == 2 and {rank.nice() for rank in ranks} == {psutil.Process().nice()}
        assert '"chat.completion"' in answer.stdout
        assert httpx.get(f"{url}/ready").json()["models"] == {"tiny-llama": 1, "org/other": 1}
        cards = {card["id"]: card.get("max_model_len") for card in httpx.get(f"{url}/v1/models").json()["data"]}
        assert cards == {"tiny-llama": 4096, "small": 4096, "org/other": 512, "far": None}
        assert said("tiny-llama") == said("small") == said("far") != said("org/other")
        assert said("gone") == 404
        assert reachable([psutil.Process(server.process.pid), *server.family()]) == []
        (folder,) = Path("/tmp").glob(f"shoal-ray-{server.process.pid}-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        asked = httpx.post(f"{url}/v1/completions", json={"model": "small", "prompt": "Hello", "max_tokens": 1})
        found = shoal("logs", asked.headers["x-request-id"])
        assert found.returncode == 0 and "prompt_tokens=" in found.stdout
        assert shoal("logs", "no-such-request").returncode == 1
        assert httpx.get(f"http://127.0.0.1:{free_port}/ready").status_code == 200
        family = server.family()
        names = [" ".join(process.cmdline()) for process in family]
        assert any("gcs_server" in name for name in names) and any("Rank" in name for name in names)
        assert not any("ProxyActor" in name for name in names)  # the routers listen themselves
        listeners = [process for process, name in zip(family, names, strict=True) if "shoal:Router" in name]
        assert len(listeners) == 2
        listeners[0].kill()
        listeners[0].wait()
        assert all(httpx.get(f"http://127.0.0.1:{free_port}/ready").status_code == 200 for _ in range(8))

        assert server.interrupt(signal.SIGINT) == 0
        assert [process for process in family if process.is_running()] == []
        assert not list(Path("/tmp").glob(f"shoal-ray-{server.process.pid}-*"))
        with socket.create_server(("127.0.0.1", free_port)):
            pass  # nobody holds the port


def reachable(processes: list[psutil.Process]) -> list[tuple[str, str, int]]:
    """The sockets of processes that other machines can reach: each process's name, and the address and port."""
    listening = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for found in process.net_connections(kind="inet"):
                address = ipaddress.ip_address(found.laddr.ip) if found.laddr else None
                if isinstance(address, ipaddress.IPv6Address):
                    address = address.ipv4_mapped or address
                if found.status == psutil.CONN_LISTEN and address is not None and not address.is_loopback:
                    listening.append((process.name(), str(address), found.laddr.port))
    return listening


def shoal(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shoal.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)


def command(process: psutil.Process) -> str:
    """The process's command line; empty once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):  # also of zombies
        return " ".join(process.cmdline())
    return ""


class Load:
    """Clients that ask for the same again and again, each time over a connection of their own."""

    def __init__(self, url: str, model: str, clients: int) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._stopping = threading.Event()
        self.texts: list[str] = []
        self._pool = ThreadPoolExecutor(clients)
        self._clients = [self._pool.submit(self._ask_often) for _ in range(clients)]

    def ask(self, tokens: int = 100) -> str:
        """The text of an answer that came as a stream."""
        body = {"model": self._model, "prompt": "Hello", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", self._url, json=body | {"stream": True}, timeout=60) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1])

    def _ask_often(self) -> None:
        while not self._stopping.is_set():
            self.texts.append(self.ask())

    def end(self) -> None:
        """Raises the error of a request that failed."""
        self._stopping.set()
        for client in self._clients:
            client.result(END_S)
        self._pool.shutdown()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(START_S)
def test_replicas_and_routers_come_and_go_under_load_and_no_request_fails(
    tiny_model: Path, tmp_path: Path, free_port: int
) -> None:
    """As a followed file says, and streams longer than `drain_s` have their ends. When the server ends by SIGTERM, a
    short one has its end, and a long one an error."""
    path, url = tmp_path / "shoal.yaml", f"http://127.0.0.1:{free_port}"

    def write(number: int, **more: Any) -> None:
        settings = {"model": str(tiny_model), "served_model_name": "tiny", "kv_tokens": 32768, "drain_s": DRAIN_S}
        new = tmp_path / "new.yaml"
        new.write_text(yaml.safe_dump(settings | {"replicas": number, "routers": number} | more))
        new.replace(path)

    def processes(name: str) -> list[psutil.Process]:
        return [process for process in server.family() if name in command(process)]

    def until_there_are(number: int) -> None:
        """Polls: processes come and go by other processes' doing."""
        deadline = time.monotonic() + START_S
        while [len(processes(name)) for name in ("ray::Rank", "shoal:Router")] != [number, number]:
            assert time.monotonic() < deadline
            time.sleep(0.1)

    write(1)
    slow = {"PYTHONPATH": os.pathsep.join([str(IMAGE), *sys.path]), "SHOAL_STEP_S": str(STEP_S)}
    clients = Clients(lambda: None, "Hello")

    def begin(seconds: float) -> Stream:
        return clients.begin("127.0.0.1", int(seconds / STEP_S), free_port)

    with running("--config", str(path), "--follow", "--port", str(free_port), **slow) as server:
        server.wait_for("Ctrl-C")
        first = {*processes("ray::Rank"), *processes("shoal:Router")}
        load = Load(url, "tiny", clients=2)
        write(2)
        server.wait_for("Replica: 1 become 2")
        server.wait_for("Router: 1 become 2")
        until_there_are(2)
        write(2, page_size=32)
        server.wait_for("page_size: cannot change while the server runs")
        assert first < {*processes("ray::Rank"), *processes("shoal:Router")}, "nothing was started again"
        while httpx.get(f"{url}/ready").json()["models"] != {"tiny": 2}:
            time.sleep(0.1)
        while 'shoal_replicas_wanted{model="tiny"} 2.0' not in httpx.get(f"{url}/metrics").text:
            time.sleep(0.1)
        streams = [begin(4 * DRAIN_S) for _ in range(8)]  # all on the router that stays: 2 to the power of -8
        write(1)
        server.wait_for("Router: 2 become 1")
        until_there_are(1)
        load.end()
        assert len(load.texts) > 10 and len(set(load.texts)) == 1
        for stream in streams:
            stream.future.result(END_S)
            assert stream.is_whole(streams[0].text), stream.told()
        short, long = begin(DRAIN_S / 4), begin(6 * DRAIN_S)
        assert server.interrupt(signal.SIGTERM) == 0
        clients.close()
        assert short.is_whole(streams[0].text), short.told()
        assert long.error == "server_ends", long.told()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(START_S)
@pytest.mark.parametrize(
    ("process", "signum"),
    [("raylet/raylet", signal.SIGINT), ("ray::Rank", signal.SIGTERM), ("ray::Rank", signal.SIGKILL)],
)
def test_a_start_that_is_stopped_leaves_nothing(tiny_model: Path, free_port: int, process: str, signum: int) -> None:
    with running("--model", str(tiny_model), "--port", str(free_port), "--replicas", "1") as server:
        server.wait_for("^starting Ray$")
        while not (family := server.family_with(process)):
            assert server.process.poll() is None
        if signum == signal.SIGKILL:
            server.process.kill()
            server.process.wait()
            ended = shoal("stop", "--pid", str(server.process.pid))
            assert ended.returncode == 0, ended.stderr
            assert shoal("stop", "--pid", str(server.process.pid)).returncode == 1
        else:
            assert server.interrupt(signum) == 0
        _, left = psutil.wait_procs(family, timeout=END_S if signum != signal.SIGKILL else 1)
        assert [each for each in left if each.status() != psutil.STATUS_ZOMBIE] == []  # whose parent was killed
        assert not list(Path("/tmp").glob(f"shoal-ray-{server.process.pid}-*"))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(START_S)
@pytest.mark.parametrize(
    ("said", "process"),
    [
        ("^starting Ray$", "raylet/raylet"),
        ("^starting Ray Serve$", "gcs_server"),
        ("Replica: 1 starting", "raylet/raylet"),
        ("Ctrl-C", "gcs_server"),
    ],
)
def test_a_server_whose_ray_dies_says_so_and_leaves_no_process(
    tiny_model: Path, free_port: int, said: str, process: str
) -> None:
    """Whatever it waits for: Ray's own calls would wait for a minute, and then end it without a word."""
    with running("--model", str(tiny_model), "--port", str(free_port), "--replicas", "1") as server:
        server.wait_for(said)
        while not (family := server.family_with(process)):
            assert server.process.poll() is None
        for each in family:
            if process in command(each):
                each.kill()
        server.wait_for("^shoal: Ray ")
        assert server.process.wait(END_S) == 1
        assert "Traceback" not in "\n".join(server.lines)
        assert [each for each in family if each.is_running()] == []


@pytest.mark.slow
def test_a_taken_port_is_an_error_before_anything_starts(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with running("--model", str(tiny_model), "--port", str(port)) as server:
            said = server.wait_for("^shoal: ")
            assert f"port {port} of 127.0.0.1" in said and "--port" in said
            assert server.process.wait(END_S) == 1


@pytest.mark.parametrize(
    ("runs", "address", "drain", "looks", "said"),
    [
        (True, None, True, 3, " 7 s "),
        (True, "auto", False, 3, " 7 s "),
        (True, None, False, 0, "cut off"),
        (False, "auto", True, 0, "cut off"),
    ],
)
def test_a_server_that_is_terminated_waits_for_its_streams(
    runs: bool, address: str | None, drain: bool, looks: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = io.StringIO(), iter([True, True, False])
    left: list[bool] = []
    monkeypatch.setattr(joined, "POLL_S", 0)
    monkeypatch.setattr(joined, "runs", lambda: left.append(next(asked)) or left[-1])
    monkeypatch.setattr(joined.serve, "delete", lambda *its, **more: None)
    server = launch._Launch(Config(drain_s=7, address=address), Console(file=out, width=500))
    server._runs = runs
    server.interrupted(drain)
    assert len(left) == looks and said in out.getvalue()


def test_a_server_whose_ray_is_gone_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*its: object, **more: object) -> None:
        raise RuntimeError("no controller")

    out = io.StringIO()
    monkeypatch.setattr(joined, "runs", lambda: True)
    monkeypatch.setattr(joined.serve, "delete", gone)
    server = launch._Launch(Config(), Console(file=out, width=500))
    server._runs = True
    server.interrupted(drain=True)
    assert "no controller" in out.getvalue()


def test_more_gpus_than_a_machine_has() -> None:
    config = Config(device="cuda", replicas=2, tp=2, pp=2)
    start = launch._Launch(config, Console())
    start._check_gpus(8, config)
    with pytest.raises(launch.LaunchError, match=r"^replicas=2 of tp=2, pp=2 .*\b8 GPUs.*\b4\b"):
        start._check_gpus(4, config)
    with pytest.raises(launch.LaunchError, match=r"\b0: .*\bcpu\b"):
        start._check_gpus(0, config)


@pytest.mark.parametrize(
    ("settings", "loads", "said"),
    [
        ({"device": "cpu", "cpus_per_rank": 3.5}, [], {"2 replicas on cpu", "float32", "3 threads a rank"}),
        (
            {"device": "cpu", "dtype": "float16", "cpu_threads": 4, "replicas": 1},
            [4096],
            {"float16", "4,096 KV tokens"},
        ),
        ({"device": "cuda"}, [5000, 4096], {"bfloat16", "4,096 KV tokens each"}),
    ],
)
def test_what_is_derived_is_told(settings: dict[str, Any], loads: list[int], said: set[str]) -> None:
    (model,) = Config(**settings).deployments
    parts = launch.derived(model, [{"kv_tokens_total": tokens} for tokens in loads]).split(", ")
    assert said <= set(parts)
    assert any("thread" in part for part in parts) == (model.device == "cpu")
    assert any("KV" in part for part in parts) == bool(loads)


ALL = {"address": "auto", "host": "0.0.0.0"}


@pytest.mark.parametrize(
    ("settings", "hosts", "asked"),
    [
        ({}, ["127.0.0.1"], "127.0.0.1"),
        ({"host": "0.0.0.0"}, ["127.0.0.1"], "127.0.0.1"),
        (ALL, ["10.0.0.1"], "127.0.0.1"),
        (ALL | {"router_hosts": ["10.0.0.1", "10.0.0.2"]}, ["10.0.0.1", "10.0.0.2"], "127.0.0.1"),
        (ALL | {"router_hosts": ["10.0.0.3", "10.0.0.2"]}, ["10.0.0.3", "10.0.0.2"], "10.0.0.3"),
        (ALL | {"router_hosts": ["10.0.0.9", "10.0.0.3"]}, ["10.0.0.3", "10.0.0.9"], "10.0.0.3"),
        (ALL | {"router_hosts": ["10.0.0.9", "10.0.0.8"]}, ["10.0.0.9", "10.0.0.8"], "10.0.0.9"),
        ({"address": "auto", "host": "::", "router_hosts": ["fe80::2"]}, ["[fe80::2]"], "[fe80::2]"),
        ({"address": "auto", "host": "10.0.0.1"}, ["10.0.0.1"], "10.0.0.1"),
    ],
)
def test_the_addresses_of_routers_are_those_that_clients_reach(
    settings: dict[str, Any], hosts: list[str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"Alive": number != 8, "NodeManagerAddress": f"10.0.0.{number}", "Resources": {}} for number in (1, 2, 3, 8)
    ]
    monkeypatch.setattr(launch, "_this_node", lambda: "10.0.0.1")
    monkeypatch.setattr(launch.ray, "nodes", lambda: nodes)
    one = launch._Launch(Config(**settings, port=80), Console(file=io.StringIO()))
    assert one._urls() == [f"http://{host}:80" for host in hosts]
    assert one._url == f"http://{asked}:80"


@pytest.mark.parametrize(
    ("address", "is_terminal", "words", "others"),
    [
        (None, True, ["Ctrl-C"], ["shoal stop"]),
        (None, False, ["Ctrl-C"], ["shoal stop"]),
        ("auto", True, ["Ctrl-C", "`shoal stop` on a machine of the cluster"], []),
        ("auto", False, ["`shoal stop` on a machine of the cluster"], ["Ctrl-C"]),  # as under a supervisor
    ],
)
def test_how_the_server_is_stopped_is_told(
    address: str | None, is_terminal: bool, words: list[str], others: list[str]
) -> None:
    one = launch._Launch(Config(address=address), Console(file=io.StringIO(), force_terminal=is_terminal))
    line = one._how_to_stop()
    assert all(word in line for word in words) and not any(word in line for word in others), line


@pytest.mark.parametrize(
    ("replicas", "machines", "said"),
    [(2, 1, ""), (40, 1, "37.4 CPUs are missing"), (40, 11, "")],
)
def test_what_a_cluster_lacks_is_told_at_once(
    replicas: int, machines: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": f"10.0.0.{i}", "Resources": {"CPU": 4.0}} for i in range(machines)]
    monkeypatch.setattr(launch, "_this_node", lambda: "10.0.0.0")
    monkeypatch.setattr(launch.ray, "nodes", lambda: nodes)
    written = io.StringIO()
    config = Config(address="auto", device="cpu", replicas=replicas, routers=1)
    launch._Launch(config, Console(file=written))._tell_room(config)
    assert said in written.getvalue() and bool(said) is bool(written.getvalue())


def overview(*states: tuple[str, str, int]) -> ApplicationStatusOverview:
    """Of an application that is not complete: the name, the status, and how many run of each deployment."""
    trigger = Trigger.CONFIG_UPDATE_STARTED
    found = {
        name: DeploymentStatusOverview(DeploymentStatus(status), trigger, {ReplicaState.RUNNING: number}, "")
        for name, status, number in states
    }
    return ApplicationStatusOverview(ApplicationStatus.DEPLOYING, "", 0.0, found)


@pytest.mark.parametrize(
    ("replicas", "running", "replaces", "routers", "serves"),
    [
        (4, 3, False, "HEALTHY", True),
        (4, 2, False, "HEALTHY", False),
        (4, 3, False, "UPDATING", False),
        (4, 3, True, "HEALTHY", False),  # of which some may be of the old version
        (3, 2, False, "HEALTHY", False),
        (40, 3, False, "HEALTHY", True),
    ],
)
def test_a_server_is_ready_once_all_runs_that_has_room(
    replicas: int, running: int, replaces: bool, routers: str, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(launch.ray, "nodes", lambda: nodes)
    hosts = ["10.0.0.1", "10.0.0.9"]
    config = Config(address="auto", device="cpu", replicas=replicas, routers=1, router_hosts=hosts, cpus_per_router=0.9)
    written = io.StringIO()
    one = launch._Launch(config, Console(file=written, width=500))
    one._replaces = replaces
    there = [("Replica", "UPDATING", running), ("Router-10.0.0.1", routers, 0), ("Router-10.0.0.9", "UPDATING", 0)]
    assert one._serves(overview(*there)) is serves
    assert not one._serves(overview(*there[:2])) and not one._serves(None)
    for _ in range(2):
        one._tell_room(config)
    assert written.getvalue().count("room for 3 of") == (replicas > 3)


@pytest.mark.parametrize("replaces", [False, True])
def test_models_with_room_are_served_without_those_that_have_none(
    replaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(launch.ray, "nodes", lambda: nodes)
    models = [{"name": "small", "model": "a", "device": "cpu"}, {"name": "large", "model": "b", "device": "cuda"}]
    config = Config(address="auto", replicas=1, routers=1, router_hosts=["10.0.0.1"], models=models)
    written = io.StringIO()
    one = launch._Launch(config, Console(file=written, width=500))
    one._replaces = replaces
    one._tell_room(config)
    small, large = (each.name for each in config.deployments)
    assert one._without_room(one._short) == {large} and "room for 0 of replicas=1 of large only" in written.getvalue()
    names = [config.deployment_name(each) for each in config.deployments]
    there = overview((names[0], "HEALTHY", 1), (names[1], "UPDATING", 0), ("Router", "HEALTHY", 1))
    assert one._serves(there)
    monkeypatch.setattr(launch, "_asked", lambda url, config: {"models": {small: 1, large: 0}})
    assert one._is_ready(frozenset([large])) and not one._is_ready()


def test_what_lacks_is_told_again_when_another_number_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 4.0}}]
    monkeypatch.setattr(launch.ray, "nodes", lambda: nodes)
    config = Config(address="auto", device="cpu", replicas=4, routers=1, router_hosts=["10.0.0.1"])
    written = io.StringIO()
    one = launch._Launch(config, Console(file=written, width=500))
    for replicas in (4, 4, 8):
        one._tell_room(config.changed(lambda each, number=replicas: each.model_copy(update={"replicas": number})))
    assert written.getvalue().count("replicas=4") == written.getvalue().count("replicas=8") == 1


def test_a_new_version_asks_for_no_more_than_has_room() -> None:
    config = Config(replicas=4)
    assert launch._with_room(config, None).deployments[0].replicas == 4
    few = launch._with_room(config, Shortage({}, {config.deployments[0].name: 1}, {}, {}, 1))
    assert few.num_routers == config.num_routers
    for placed, number in ((3, 3), (0, 1)):
        short = Shortage({"default": 4}, dict.fromkeys([config.deployments[0].name], placed), {}, {}, 1)
        assert launch._with_room(config, short).deployments[0].replicas == number


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_router_with_a_key_and_a_certificate_is_asked(is_closed: bool, tmp_path: Path) -> None:
    """The certificate is nobody's whom this machine trusts."""
    issued = Issued(tmp_path)
    issued.issue(elliptic())

    class Router(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "Bearer sesame" or not is_closed else 401)
            self.end_headers()
            replicas = [{"load": {"kv_tokens_total": 64}}, {"load": None}]
            state = {"models": [{"name": "tiny", "replicas": replicas}]}
            self.wfile.write(json.dumps({"models": {"tiny": 1}} if self.path == "/ready" else state).encode())

        def log_message(self, *_: Any) -> None:
            pass

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(issued.certificate, issued.key)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Router) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://127.0.0.1:{server.server_port}"
        config = Config(**issued.limits, api_key="sesame")
        assert launch._is_ready(f"{url}/ready", config)
        assert launch._loads(f"{url}/state", config) == {"tiny": [{"kv_tokens_total": 64}]}
        assert launch._loads(f"{url}/state", Config(**issued.limits)) == (
            {} if is_closed else {"tiny": [{"kv_tokens_total": 64}]}
        )
        server.shutdown()
    assert not launch._is_ready(f"{url}/ready", config)


def test_how_the_model_wants_to_be_sampled_is_told_at_the_start(tmp_path: Path) -> None:
    def told(said: str, **settings: str) -> str:
        (tmp_path / "generation_config.json").write_text(said)
        out = io.StringIO()
        config = Config(**settings)
        launch._Launch(config, Console(file=out, width=500))._tell_defaults(tmp_path, config.deployments[0])
        return out.getvalue()

    said = '{"temperature": 0.6, "top_k": "20", "top_p": 0.95}'
    problem, line = told(said).splitlines()
    assert "generation_config.json: top_k is " in problem
    assert line.endswith("(generation_config.json): temperature 0.6, top_p 0.95")
    assert told("{}", model="org/name") == told(said, sampling_defaults="openai") == ""
    with pytest.raises(launch.LaunchError, match=r"generation_config\.json"):
        told("{")


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"pp": 3}, r"^pp=3 .*\b2 layers\b.*\bpp$"),
        ({"tp": 8}, r"^tp=8 .*\b4 attention heads\b.*\btp$"),
        ({"pp": 2, "stage_layers": "2,2"}, r"^stage_layers=2,2 .*\b4 layers\b.*\b2$"),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_an_error_before_anything_starts(
    settings: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    folder = dummy_models.write("tiny", tmp_path / "tiny")
    launch._check_cut(folder, Config(pp=2, stage_layers="1,1").deployments[0])
    with pytest.raises(launch.LaunchError, match=wrong):
        launch._check_cut(folder, Config(**settings).deployments[0])


def test_a_draft_model_of_another_vocabulary_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    folder, draft = (dummy_models.write("tiny", tmp_path / name) for name in ("tiny", "draft"))
    config = Config(speculation="auto", draft_model=str(draft)).deployments[0]
    for one, tokens in ((folder, "ab"), (draft, "ba")):
        vocabulary = {token: number for number, token in enumerate(tokens)}
        (one / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    launch._check_draft(folder, config.model_copy(update={"draft_model": str(folder)}))
    with pytest.raises(launch.LaunchError, match="vocabulary"):
        launch._check_draft(folder, config)


def test_a_file_without_keys_is_an_error_before_anything_starts(tmp_path: Path, free_port: int) -> None:
    keys = tmp_path / "keys"
    with pytest.raises(launch.LaunchError, match=r"api_key_file: .*No such file"):
        launch._Launch(Config(api_key_file=keys, port=free_port), Console()).start()
    keys.write_text("\n")
    with pytest.raises(launch.LaunchError, match=r"api_key_file: .*no key"):
        launch._Launch(Config(api_key_file=keys, port=free_port), Console()).start()
    files = {"ssl_certfile": keys, "ssl_keyfile": keys}  # which are no certificate
    with pytest.raises(launch.LaunchError, match="ssl_certfile"):
        launch._Launch(Config(**files, port=free_port), Console()).start()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(START_S)
def test_a_model_that_cannot_be_loaded_says_why(tiny_model: Path, tmp_path: Path, free_port: int) -> None:
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with running("--model", str(tmp_path), "--port", str(free_port), "--replicas", "1") as server:
        said = server.wait_for("^shoal: ")
        assert "rank 0: " in said and "afetensor" in said
        assert "Traceback" not in "\n".join(server.lines)
        assert server.process.wait(END_S) == 1


class Deployment:
    def __init__(self, message: str) -> None:
        self.message = message
        self.status_trigger = (
            Trigger.HEALTH_CHECK_FAILED if "health check" in message else Trigger.CONFIG_UPDATE_STARTED
        )
        self.replica_states = {"STARTING": 1}


class Overview:
    def __init__(self, status: ApplicationStatus, app_message: str, *messages: str) -> None:
        self.status = status
        self.message = app_message
        self.deployments = {str(number): Deployment(message) for number, message in enumerate(messages)}


RETRY = "A replica failed to start with exception. Retrying 2 more times. Error:\n"
STACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in y\n    z()\n'


@pytest.mark.parametrize(
    ("overview", "reason"),
    [
        (None, None),
        (Overview(ApplicationStatus.DEPLOYING, "", "", "waiting for resources"), None),
        (Overview(ApplicationStatus.RUNNING, "", ""), None),
        (
            Overview(ApplicationStatus.DEPLOYING, "", RETRY + STACK + "x.ReplicaError: rank 0: OSError: no"),
            "rank 0: OSError: no",
        ),
        (Overview(ApplicationStatus.DEPLOYING, "", RETRY + STACK + "ValueError: bad thing\n"), "ValueError: bad thing"),
        (Overview(ApplicationStatus.DEPLOY_FAILED, "no room", ""), "\nno room"),
        (Overview(ApplicationStatus.UNHEALTHY, "", "A replica's health check failed: ActorDiedError: died\n"), None),
        (Overview(ApplicationStatus.DEPLOY_FAILED, "Failed to update", "A replica's health check failed."), None),
        (Overview(ApplicationStatus.DEPLOYING, "", RETRY + "ray.exceptions.ActorDiedError: The actor died.\n"), None),
    ],
)  # fmt: skip
def test_the_reason_of_a_failure_is_found_in_serves_messages(overview: Overview | None, reason: str | None) -> None:
    assert launch._failure(overview) == reason  # type: ignore[arg-type]


def test_a_signal_that_comes_where_nothing_can_be_raised_ends_the_start_all_the_same(tiny_model: Path) -> None:
    start = launch._Launch(Config(model=str(tiny_model)), Console())
    with contextlib.suppress(KeyboardInterrupt):  # as Python does it in a hook around a fork
        start.interrupt(signal.SIGTERM, None)
    with pytest.raises(launch._Terminated):
        start._say("starting Ray")


def test_what_waits_for_room_is_told_once_whatever_order_ray_writes_its_resources_in() -> None:
    def told(required: dict[str, float], available: dict[str, float]) -> str:
        message = f"has 1 replicas to be scheduled: {required}, total resources available: {available}."
        return launch._short(Overview(ApplicationStatus.DEPLOYING, "", message))  # type: ignore[arg-type]

    one, two = ({"CPU": 1.0, "GPU": 2.0}, {"GPU": 2.0, "CPU": 1.0})
    assert told(one, one) == told(two, two) == told(one, two)
    assert told(one, one) != told(one, {"CPU": 1.0, "GPU": 3.0})
