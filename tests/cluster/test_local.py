"""One machine's share of a configuration, and looking before starting Ray."""

import contextlib
import logging
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from cluster import local
from cluster.config import Config, DeploymentConfig, load
from cluster.log_lines import LineFormatter, LogFormat
from router.http.listener import bind
from worker.executor import memory_budget


def one(config: Config) -> DeploymentConfig:
    (deployment,) = config.deployments
    return deployment


@pytest.mark.parametrize(("replicas", "cores", "each"), [(2, 2, 1), (2, 16, 8), (8, 2, 1), (3, 16, 5)])
def test_the_cores_are_shared_out(replicas: int, cores: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert one(local.fit(load(overrides={"replicas": replicas}))).cpus_per_rank == each
    assert one(local.fit(load(overrides={"replicas": replicas, "cpus_per_rank": 7}))).cpus_per_rank == 7


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"replicas": 2}, 0.125),
        ({"replicas": 1}, 0.25),
        ({"replicas": 4, "pp": 2, "tp": 2}, 0.25 / 16),
        ({"replicas": 4, "kv_memory_fraction": 0.5}, 0.5),
        ({"device": "cuda"}, None),
    ],
)
def test_the_memory_for_kv_caches_is_shared_out(settings: dict[str, Any], each: float | None) -> None:
    assert one(local.share_memory(load(overrides={"device": "cpu", **settings}))).kv_memory_fraction == each


def test_several_models_share_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    models = [
        {"name": "a", "model": "org/a", "replicas": 2},
        {"name": "b", "model": "org/b", "replicas": 1, "tp": 2},
        {"name": "c", "model": "org/c", "replicas": 1, "device": "cuda", "cpus_per_rank": 2},
        {"name": "d", "upstream": {"url": "http://d/v1"}},
    ]
    config = local.share_memory(local.fit(load(overrides={"device": "cpu", "models": models})))
    assert [deployment.cpus_per_rank for deployment in config.deployments] == [3, 3, 2]  # 16 cores, five ranks
    shares = [deployment.kv_memory_fraction for deployment in config.deployments]
    assert shares == [0.25 / 4, 0.25 / 4, None]
    assert [entry.name for entry in config.entries] == ["a", "b", "c", "d"]


def test_the_default_fits_the_memory_that_the_readme_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the KV caches full. The other figures were measured, as the sum of what the processes have for themselves
    (PSS): all that `make serve` starts when it can answer, and what it takes more of with some hundred requests. A
    system without a desktop takes the rest."""
    system, started, working = 0.5e9, 3.35e9, 0.5e9
    (promised_gb,) = re.findall(r"(\d+) GB of memory", (Path(__file__).parents[2] / "README.md").read_text())
    promised = int(promised_gb) * 1e9
    monkeypatch.setattr(memory_budget, "available_memory_bytes", lambda: int(promised - system))  # nothing is started
    config = one(local.share_memory(load(overrides={"device": "cpu"})))
    token_bytes = 2 * 30 * 3 * 64 * 4  # SmolLM2's layers, KV heads and head dimension, in float32
    caches = config.replicas * memory_budget.cpu_tokens(token_bytes, config.kv_memory_fraction) * token_bytes
    assert system + started + working + caches <= promised


def test_replicas_are_not_reachable_from_outside_unless_asked() -> None:
    assert one(local.fit(load())).replica_host == "127.0.0.1"
    assert one(local.fit(load(overrides={"replica_host": "0.0.0.0"}))).replica_host == "0.0.0.0"


def test_a_path_holds_in_every_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    assert one(local.fit(load(overrides={"model": "./mine"}))).model == str(tmp_path / "mine")
    assert one(local.fit(load(overrides={"model": "org/name"}))).model == "org/name"
    drafted = load(overrides={"model": "org/name", "speculation": "auto", "draft_model": "./mine"})
    assert one(local.fit(drafted)).draft_model == str(tmp_path / "mine")
    assert one(local.fit(load())).draft_model is None
    (tmp_path / load().model).mkdir()
    assert one(local.fit(load())).model == load().model, "a known name wins"


def test_a_free_port_and_a_taken_one(free_port: int) -> None:
    local.check_port("127.0.0.1", free_port)
    with socket.create_server(("127.0.0.1", free_port)), pytest.raises(local.PortTaken, match=str(free_port)):
        local.check_port("127.0.0.1", free_port)


@pytest.mark.parametrize("at_first", ["the port", "the router"])
def test_a_port_is_held_while_no_router_runs_and_takes_no_connection_of_theirs(free_port: int, at_first: str) -> None:
    bound = [bind("127.0.0.1", free_port)] if at_first == "the router" else []
    with local.hold_port("127.0.0.1", free_port) or contextlib.nullcontext():
        with bound[0] if bound else bind("127.0.0.1", free_port) as router:
            router.listen()
            for _ in range(20):
                socket.create_connection(("127.0.0.1", free_port), timeout=5).close()
                router.accept()[0].close()
        with pytest.raises(local.PortTaken):  # a second server, while the router is dead
            local.check_port("127.0.0.1", free_port)
    local.check_port("127.0.0.1", free_port)


def test_what_cannot_be_held_hinders_no_router() -> None:
    """A port where connections of another program are closing, whose sockets are not shared, as those of another
    user."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            other.accept()[0].close()  # first, so that the kernel keeps the connection for a minute
            assert client.recv(1) == b""
    local.check_port("127.0.0.1", port)
    assert local.hold_port("127.0.0.1", port) is None
    with bind("127.0.0.1", port) as router:
        router.listen()


def test_an_address_of_another_machine_is_named(free_port: int) -> None:
    with pytest.raises(OSError, match=rf"203\.0\.113\.1:{free_port}: .*--host"):
        local.check_port("203.0.113.1", free_port)


@pytest.mark.slow
def test_ray_is_told_to_be_quiet_before_it_is_imported() -> None:
    code = (
        "import cluster.launch; from ray._private import ray_constants; print(ray_constants.RAY_DEDUP_LOGS_SKIP_REGEX)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("A worker died")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_why_replicas_ended_is_in_their_logs(tmp_path: Path, log_format: LogFormat) -> None:
    logs = local.logs(tmp_path) / "serve"
    logs.mkdir(parents=True)

    def write(name: str, *lines: tuple[int, str]) -> None:
        formatter = LineFormatter(log_format, {"replica": name})
        records = [logging.LogRecord("ray.serve", level, "", 0, text, None, None) for level, text in lines]
        text = "".join(f"{formatter.format(record)}\n" for record in records)
        (logs / f"replica_shoal_Replica_{name}.log").write_text(text)

    write(
        "a",
        (logging.INFO, "replica at rest"),
        (logging.ERROR, "replica at tcp://127.0.0.1:1: rank 0: ValueError: no\nmore"),
        (logging.ERROR, "something of Ray's"),
    )
    for name in "bc":  # one attempt after the other
        write(name, (logging.ERROR, "replica does not start: rank 0: OSError: no file"))
    assert local.reasons(tmp_path) == [
        "replica at tcp://127.0.0.1:1: rank 0: ValueError: no",
        "replica does not start: rank 0: OSError: no file",
    ]
    assert local.reasons(tmp_path / "session_latest") == []


def test_an_address_where_nothing_listens(free_port: int) -> None:
    with pytest.raises(ConnectionRefusedError):
        local.join(f"127.0.0.1:{free_port}")


@pytest.fixture
def made() -> Iterator[Callable[[str], Path]]:
    """Makes folders in /tmp with names that begin as those of servers, and removes them."""
    folders: list[Path] = []

    def make(name: str) -> Path:
        folders.append(Path(f"/tmp/{local.PREFIX}{name}"))
        folders[-1].mkdir()
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


NOBODY = 2**22 + 1  # no process has such an id


def test_what_dead_servers_left_is_removed(made: Callable[[str], Path]) -> None:
    mine, dead = made(f"{os.getpid()}-test"), made(f"{NOBODY}-test")
    local._sweep()
    assert (mine.exists(), dead.exists()) == (True, False)


@pytest.mark.parametrize("name", ["x", "", "x-y", "-1-a", "0x1-a", "\u0661-a", "9" * 30 + "-a", "1-a b", "1"])
def test_a_folder_that_is_no_servers_stops_nothing(made: Callable[[str], Path], name: str) -> None:
    foreign = made(name)
    link = Path(f"/tmp/{local.PREFIX}{NOBODY}-link{os.getpid()}")
    link.symlink_to(foreign)
    lost = Path(f"/tmp/{local.PREFIX}{NOBODY}-lost{os.getpid()}")
    lost.symlink_to("/nowhere")
    try:
        local._sweep()
        assert foreign not in local.folders().values() and link not in local.folders().values()
        assert foreign.exists() and link.is_symlink() and lost.is_symlink()
    finally:
        link.unlink()
        lost.unlink()


MAKES = "from cluster import local; print(local.make_folder(), flush=True); input()"


@contextlib.contextmanager
def server(*before: str) -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    """A process that has a folder, as `shoal serve`. `before`: a command that starts it."""
    command = [*before, sys.executable, "-c", MAKES]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        try:
            yield process, folder
        finally:
            process.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_a_folder_is_its_users_alone_and_lives_as_long_as_its_server(made: Callable[[str], Path]) -> None:
    with server() as (process, folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and local.folders()[process.pid] == folder
        of_another = folder.rename(f"/tmp/{local.PREFIX}{NOBODY}-{os.getpid()}")  # as if its process were not seen
        try:
            local._sweep()
            assert of_another.exists()
            (of_another / local.LOCK).write_text("pid:[1]")  # of another container
            assert of_another not in local.folders().values()
            sockets = of_another / local.RAYS / "session_x" / "sockets"
            sockets.mkdir(parents=True)
            process.kill()
            process.wait()
            with socket.socket(socket.AF_UNIX) as left:  # by a Ray that nobody ends
                left.bind(str(sockets / "raylet"))
                left.listen()
                local._sweep()
                assert of_another.exists()
            local._sweep()
            assert not of_another.exists()
        finally:
            shutil.rmtree(of_another, ignore_errors=True)


def test_a_token_that_is_made_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / ".ray" / "auth_token"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "theirs")
    local._make_token()
    assert not path.exists()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    local._make_token()
    made = path.read_text()
    assert len(made) == 64 and stat.S_IMODE(path.stat().st_mode) == 0o600 and local.open_token() is None
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)  # as Ray makes it
    local._make_token()
    assert path.read_text() == made and local.open_token() == path


def test_children_that_nobody_waits_for_are_reaped() -> None:
    """As the compiler of a rank that was killed: `shoal serve` has adopted it."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    ended = local.reap(set())
    assert child.pid in ended and psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE  # time for who waits
    assert child.pid not in local.reap(ended) and not psutil.pid_exists(child.pid)
    child.wait()
