"""`ray up` as an operator has it: real sshd hosts, Ray's own launcher, the files of the checkout; under streams.

The server is changed in every way that an operator or a fault would, under streams that last longer than any drain, and
what clients saw is counted. `python -m tests.deploy.ray_up --stream-s 600 --out FILE` does it with longer streams.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.hosts import Host, Network, cgroups, network
from tests.deploy.operator import Operator
from tests.deploy.rehearsal import CONTEXT, PROMPT, command, made_model, shown, step_s, undisturbed, until
from tests.deploy.streams import Clients, Stream

STREAM_S = 60.0
SHORTER, SHORTEST = 0.6, 0.35  # of that: streams that only have to outlast the next change
QUIET_S = 45.0  # that the first `ray up` takes on a quiet machine of two cores
LOOK_S = 0.3  # between looks at what Serve has, which take CPU time from what starts
# What others leave: logins, the system's journal, and the cache of the library that draws the benchmark's plots.
OTHERS = ("var/log/lastlog", "var/log/wtmp", "var/log/btmp", "var/log/journal/", "home/ops/.cache/matplotlib/")
OTHERS += ("home/ops/.cache/fontconfig/",)
SERVE = "http://127.0.0.1:8265/api/serve/applications/"  # on the head
SETTINGS = "cluster/ray/shoal.yaml"
PORT = 8000  # of routers
PIPELINE = "--model tiny --layouts pp2 --schedules uniform --traffic '' --jobs mini_half --shrink 64"


@dataclass
class Figures:
    """| figure | meaning |
    | --- | --- |
    | `streams` | but for those that a lost host took with it |
    | `failed_requests` | of these, those that did not end whole |
    | `reloaded_replicas` | that a change of numbers started although they ran |
    | `longest_gap_s` | without a token, of the streams above |
    | `link_gb_s` | what a stage on one host sent to a stage on the other, in GB/s |
    | `left` | of processes, ports and files after `ray down` |
    | `seconds` | since the beginning, by what had been done |
    | `outlasted` | streams that were still on their way after a change, of those before it |
    """

    streams: int = 0
    failed_requests: int = 0
    reloaded_replicas: int = 0
    longest_gap_s: float = 0.0
    link_gb_s: float = 0.0
    left: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    outlasted: dict[str, int] = field(default_factory=dict)


class Rehearsal:
    """Hosts, an operator, clients, and what came of it. `tell`: called with a line for each step."""

    def __init__(self, net: Network, folder: Path, stream_s: float, tell: Callable[[str], None] = print) -> None:
        self.net = net
        self.figures = Figures()
        self.step_s = step_s(stream_s)
        self.pace = 1.0
        self.clients = Clients(net.enter, PROMPT)
        self._head = Clients(lambda: net.enter(net.hosts[0]), PROMPT)
        self.model = folder / "tiny-llama"
        (folder / "operator").mkdir()
        addresses = [host.address for host in net.hosts]
        self.operator = Operator(
            net, folder / "operator", self.model, self.step_s, drain_s=5, routers=1, replicas=2, router_hosts=addresses
        )
        self._tell, self._began, self._stream_s = tell, time.monotonic(), stream_s
        self._all: list[Stream] = []

    def say(self, what: str) -> None:
        self.figures.seconds[what] = round(time.monotonic() - self._began, 1)
        self._tell(f"{self.figures.seconds[what]:6.1f} {what}")

    def said(self, what: str) -> None:
        """A change was made under streams."""
        self.figures.outlasted[what] = sum(not stream.future.done() for stream in self._all if stream.future)
        self.say(what)

    @property
    def tokens(self) -> int:
        """Of a stream: more on a busy machine, where changes take longer, as far as the context goes."""
        return min(CONTEXT, int(self._stream_s / self.step_s * self.pace))

    def up(self) -> None:
        done = self.operator.ray("up")
        assert done.returncode == 0, done.stdout[-5000:]

    def change(self, **settings: Any) -> None:
        """Other numbers, as the page for operators says."""
        self.operator.configure(**settings)
        done = self.operator.ray("rsync-up", SETTINGS, f"~/shoal/{SETTINGS}")
        assert done.returncode == 0, done.stdout[-5000:]

    def on_head(self, command: str) -> str:
        """Runs a command on the head, as the page says. Returns what it prints."""
        done = self.operator.ray("exec", command)
        assert done.returncode == 0, done.stdout[-5000:]
        return done.stdout

    def actors(self, deployment: str = "Replica", state: str = "RUNNING") -> dict[str, str]:
        """Those of a deployment, or of all whose names begin so: the id to the host's address."""
        return _actors(self._deployments(), deployment, state)

    def _deployments(self) -> dict[str, Any]:
        """As Serve has them, by name; none while it does not answer."""
        token = (self.operator.home / ".ray" / "auth_token").read_text()
        try:
            answer = self._head.call("GET", SERVE, headers={"Authorization": f"Bearer {token}"})
            found: dict[str, Any] = answer.json()["applications"].get("shoal", {"deployments": {}})["deployments"]
        except (httpx.HTTPError, ValueError):
            return {}
        return found

    def until_there_are(self, replicas: int, routers: int, but: set[str] | None = None) -> None:
        """Waits for these numbers, without those of `but`, and for the routers to reach the replicas."""

        def there() -> bool:
            found = self._deployments()
            running, fronts = _actors(found, "Replica"), _actors(found, "Router")
            if len(running) != replicas or len(fronts) != routers or (but or set()) & {*running, *fronts}:
                return False
            return all(self.ready(host) == replicas for host in self.net.hosts if host.address in fronts.values())

        until(there, f"{replicas} replicas and {routers} routers", 400.0, LOOK_S)

    def ready(self, host: Host) -> int:
        """How many replicas the routers of a host reach."""
        answer = self.clients.call("GET", f"http://{host.address}:{PORT}/ready")
        return sum(answer.json()["models"].values()) if answer.status_code == 200 else 0

    def begin(self, *hosts: Host, share: float = 1.0) -> None:
        """Starts a stream by the router of each of these hosts. `share`: of a stream's length."""
        self._all += [self.clients.begin(host.address, int(self.tokens * share)) for host in hosts]

    def lose(self, host: Host) -> None:
        """A host goes without a word, and the streams that are on their way by its routers, which do not count."""
        lost = [each for each in self._all if each.entry == host.address and each.future and not each.future.done()]
        self._all = [each for each in self._all if each not in lost]
        host.vanish()

    def end(self) -> None:
        """Waits for all streams, and counts them."""
        text = undisturbed(self.model, self.tokens)
        for stream in self._all:
            assert stream.future is not None
            stream.future.result(3 * self._stream_s + 120)
            self.figures.streams += 1
            self.figures.longest_gap_s = round(max(self.figures.longest_gap_s, stream.gap_s), 2)
            if not stream.is_whole(text):
                self.figures.failed_requests += 1
                self.figures.failures.append(stream.told())
                self._tell(stream.told())
        self._all = []

    def close(self) -> None:
        self.clients.close()
        self._head.close()


def _actors(deployments: Mapping[str, Any], deployment: str, state: str = "RUNNING") -> dict[str, str]:
    known = [each for name in deployments if name.startswith(deployment) for each in deployments[name]["replicas"]]
    return {each["replica_id"]: each["node_ip"] for each in known if each["state"] == state}


def served(net: Network) -> list[str]:
    """Processes and ports of a server on all hosts."""
    ports = [f"{host.name}: {port}" for host in net.hosts for port in host.ports() & {PORT}]
    lines = [f"{host.name}: {line}" for host in net.hosts for line in host.processes().values()]
    return ports + [line for line in lines if "ray::Serve" in line or "ray::Rank" in line or " serve --address" in line]


def rehearse(r: Rehearsal) -> Figures:
    """Every change, under streams."""
    head, worker = r.net.hosts
    before = {host.name: host.files() | host.volatile() for host in r.net.hosts}
    r.up()
    r.until_there_are(2, 2)
    r.say("ray up: both machines serve")
    r.pace = max(1.0, r.figures.seconds["ray up: both machines serve"] / QUIET_S)

    kept = {*r.actors(), *r.actors("Router")}
    r.begin(head, head, worker)
    r.change(replicas=4, routers=2)
    r.until_there_are(4, 4)
    r.figures.reloaded_replicas += len(kept - {*r.actors(), *r.actors("Router")})
    r.said("replicas 2 to 4, routers 1 to 2")
    r.begin(head, head, worker, share=SHORTEST)
    kept = {*r.actors()}
    r.change(replicas=1, routers=1)
    r.until_there_are(1, 2)
    r.figures.reloaded_replicas += len({*r.actors()} - kept)
    r.said("replicas 4 to 1, routers 2 to 1")

    serve = next(process for process, line in head.processes().items() if "shoal serve --address" in line)
    r.net.ssh(head, "pkill -KILL -f 'shoal serve --address'")
    until(lambda: serve not in head.processes(), "shoal serve is killed")
    until(lambda: "is taken over as it is" in r.operator.log(), "a new shoal serve takes over")
    r.said("shoal serve was killed, and the next one goes on")

    r.begin(head, head, share=SHORTER)
    kept = {*r.actors(), *r.actors("Router")}
    r.operator.configure(replicas=3, max_prompts=255)
    (r.operator.checkout / "worker/_version_two.py").write_text("# another version\n")
    r.up()
    r.until_there_are(3, 2, but=kept)
    r.said("ray up: another configuration, another version")

    r.begin(head, head, worker, share=SHORTEST)
    gone = {each for each, address in r.actors().items() if address == worker.address}
    assert 0 < len(gone) < 3, "each machine has a replica"
    r.lose(worker)
    r.until_there_are(2, 1, but=gone)
    r.said("a worker's host is lost, and its replicas are replaced as far as there is room")
    worker.start()
    r.until_there_are(3, 2)
    r.say("the host is back")
    r.end()
    r.say("the streams have ended")

    head.vanish()
    head.start()
    if r.net.cgroups is None:  # nothing but systemd, or cron, starts the supervisor with the machine
        r.up()
    r.until_there_are(3, 2)
    r.say("the head was restarted")
    r.begin(head, worker, share=0.02)
    r.end()

    told = r.on_head("ray status && shoal status && shoal logs prompt_tokens= && shoal stop")
    assert "Active" in told and "tiny" in told and worker.address in told and head.address in told, told
    assert not r.actors()
    until(lambda: "the server was stopped" in r.operator.log(), "shoal serve says that it was stopped")
    until(lambda: not served(r.net), "nothing of the server is left, but Ray")
    r.say("shoal stop")

    told = r.on_head(f"cd ~/shoal && shoal bench pipeline --address auto {PIPELINE}")
    found = json.loads(r.net.ssh(head, "cat ~/shoal/shoal-bench/cpu.pipeline.json").stdout)
    assert found["settings"]["nodes"] == 2, told
    assert "cpu.pipeline.mini_half.output_tok_s" in {figure["name"] for figure in found["figures"]}, told
    r.figures.link_gb_s = round(found["points"]["link"]["bytes_per_s"] / 1e9, 2)
    r.say("shoal bench pipeline, a stage on each machine")

    done = r.operator.ray("down")
    assert done.returncode == 0, done.stdout[-5000:]
    for host in r.net.hosts:
        left = [*host.processes().values(), *map(str, host.ports())]
        new = (host.files() | host.volatile()) - before[host.name]
        left += [each for each in new if not each.startswith(OTHERS)]
        r.figures.left += [f"{host.name}: {each}" for each in left]
    r.say("ray down")
    return r.figures


def rehearsed(folder: Path, stream_s: float, tell: Callable[[str], None] = print, systemd: bool = True) -> Figures:
    """A whole rehearsal in a folder, which must be empty. `systemd`: whether hosts have it, where this machine does."""
    model = made_model(folder)
    undisturbed(model, 1)  # compiles the kernels, which the operator's checkout has
    with network(folder, ["head", "worker"], shown(model), cgroups() if systemd else None) as net:
        r = Rehearsal(net, folder, stream_s, tell)
        try:
            return rehearse(r)
        except BaseException:
            tell(r.operator.log()[-5000:])
            raise
        finally:
            r.close()


if __name__ == "__main__":
    sys.exit(
        command(
            str(__doc__),
            lambda folder, its: vars(rehearsed(folder, its.stream_s, systemd=bool(its.systemd))),
            systemd=1,
        )
    )
