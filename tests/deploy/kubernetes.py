"""KubeRay's second half by hand: the chart's RayService on pods that are hosts of `tests.deploy.hosts`.

KubeRay makes pods of the RayService, starts Ray in them, and sends `serveConfigV2` to Serve's REST API. So does this,
with the environment, the arguments and the preStop hook that `helm template` renders. Of the image, the environment
that runs this takes the place. Then the server is changed in every way that an operator or a fault would, under streams
that last longer than any drain, and what clients saw is counted.

`python -m tests.deploy.kubernetes --stream-s 600 --out FILE` does it with longer streams.
"""

import contextlib
import csv
import io
import itertools
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.hosts import Host, Network, network
from tests.deploy.rehearsal import PROMPT, ROOT, WAIT_S, command, made_model, shown, step_s, undisturbed, until
from tests.deploy.streams import IMAGE, Clients, Stream

# Of a worker, which has room for two replicas: three need both workers. Routers ask Ray for next to no CPU.
CPUS = 3
CPUS_OF = {"cpus_per_rank": 1.4, "cpus_per_router": 0.05}
STREAM_S = 60.0
SHORTER = 0.5  # streams that only have to outlast the loss or the drain of a pod


@dataclass
class Pod:
    """A host that stands for a pod. `template`: the pod's, as the chart renders it."""

    host: Host
    template: dict[str, Any]
    environment: dict[str, str]
    start: str

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.template["spec"]["containers"]
        return container

    def run(self) -> None:
        """The container's command. What fails is started again, as the kubelet does it; what SIGTERM ends is not."""
        again = f"while ! ({self.start}); do test -e /tmp/ends && break; sleep 1; done"
        self._exec(f"setsid --fork bash -c {shlex.quote(again)} < /dev/null > /tmp/container.log 2>&1")

    def pre_stop(self) -> subprocess.CompletedProcess[str]:
        return self._exec(shlex.join(self.container["lifecycle"]["preStop"]["exec"]["command"]), check=False)

    def terminate(self) -> bool:
        """SIGTERM to the container's first process, as the kubelet sends it; what has not ended within the pod's grace
        is killed. Returns whether nothing had to be."""
        self._exec("touch /tmp/ends; pkill -TERM -f '^[^ ]*python[^ ]* [^ ]*/ray start'", check=False)
        try:
            until(lambda: not self.host.processes(), f"{self.host.name} ends", self.template_grace_s)
        except AssertionError:
            for process in self.host.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            until(lambda: not self.host.processes(), f"{self.host.name} is killed")
            return False
        return True

    @property
    def template_grace_s(self) -> float:
        return float(self.template["spec"]["terminationGracePeriodSeconds"])

    def _exec(self, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return self.host.network.ssh(self.host, f"cd; env -i {variables} bash -c {shlex.quote(command)}", check=check)


def render(values: dict[str, Any]) -> dict[str, Any]:
    """The chart's RayService."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        command = [sys.executable, "-c", "import runpy; print(runpy.run_path('helm/check.py')['helm']())"]
        helm = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        command = [helm, "template", "try", "helm/shoal", "--values", file.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (service,) = [made for made in yaml.safe_load_all(done.stdout) if made and made["kind"] == "RayService"]
    return service


@dataclass
class Rehearsal:
    """The cluster, and what is done to it. `tell`: called with a line for each step."""

    net: Network
    model: Path
    stream_s: float
    drain_s: float
    tell: Callable[[str], None] = print
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    pods: dict[str, Pod] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step_s = step_s(self.stream_s)
        self.clients = Clients(self.net.enter, PROMPT)
        self.began = time.monotonic()
        self.quiet = threading.Lock()  # held while something that HAProxies count goes on

    @property
    def tokens(self) -> int:
        return int(self.stream_s / self.step_s)

    def say(self, line: str) -> None:
        self.tell(f"{time.monotonic() - self.began:6.1f} {line}")

    # ------------------------------------------------------------ KubeRay's part

    def values(self, replicas: int, routers: int, **config: Any) -> dict[str, Any]:
        own = {"drain_s": self.drain_s, "kv_tokens": 32768, "cpu_threads": 1} | CPUS_OF
        return {
            "model": str(self.model),
            "replicas": replicas,
            "routers": routers,
            "config": {"served_model_name": "tiny", **own, **config},
            "workers": {"count": 2, "resources": {"requests": {"cpu": str(CPUS)}}},
            "env": [{"name": "SHOAL_STEP_S", "value": str(self.step_s)}],
            "image": {"folders": [str(self.model)]},
        }

    def pod(self, host: Host, rendered: dict[str, Any]) -> Pod:
        """The pod as KubeRay makes it: with its own variables, and the command that starts Ray."""
        cluster = rendered["spec"]["rayClusterConfig"]
        head = self.net.hosts[0]
        if host is head:
            template, params = cluster["headGroupSpec"]["template"], dict(cluster["headGroupSpec"]["rayStartParams"])
        else:
            (group,) = cluster["workerGroupSpecs"]
            template, params = group["template"], dict(group["rayStartParams"])
            params |= {"address": f"{head.address}:6379", "num-cpus": str(CPUS)}
        params |= {"dashboard-agent-listen-port": "52365", "metrics-export-port": "8080"}
        params |= {"node-ip-address": host.address, "object-store-memory": "100000000"}
        (container,) = template["spec"]["containers"]
        environment = {entry["name"]: entry["value"] for entry in container["env"]}
        environment |= {
            "HOME": "/home/shoal",
            "PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": f"{IMAGE}:{ROOT}",
            "RAY_AUTH_MODE": cluster["authOptions"]["mode"],
            "RAY_AUTH_TOKEN": self.token,
            "RAY_ADDRESS": "127.0.0.1:6379" if host is head else f"{head.address}:6379",
            "RAY_timeout_ms_task_wait_for_death_info": "0",
            # For machines that are busy with other tests, not KubeRay's, whose RAY_SERVE_KV_TIMEOUT_S and
            # RAY_gcs_server_request_timeout_seconds of 5 s would be too short there.
            "RAY_worker_niceness": "0",
            "RAY_raylet_start_wait_time_s": "300",
        }
        arguments = " ".join(f"--{name}={value}" for name, value in params.items())
        start = f"ray start {'--head ' if host is head else ''}--block {arguments}"
        if host is not head:  # KubeRay's init container
            start = f"until (: < /dev/tcp/{head.address}/52365) 2> /dev/null; do sleep 0.5; done; {start}"
        return Pod(host, template, environment, start)

    def start(self, host: Host, rendered: dict[str, Any]) -> None:
        host.make_folders("/home/shoal", "/cache")
        self.pods[host.name] = self.pod(host, rendered)
        self.pods[host.name].run()

    def deploy(self, rendered: dict[str, Any]) -> None:
        """Sends the configuration to Serve, as KubeRay does when it changes: again, until it is taken."""
        config = yaml.safe_load(rendered["spec"]["serveConfigV2"])

        def taken() -> bool:
            answer = self._serve("PUT", json=config)
            assert answer.status_code == 200 or answer.status_code >= 500, answer.text
            return answer.status_code == 200

        until(taken, "Serve's REST API")

    def _serve(self, method: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        url = f"http://{self.net.hosts[0].address}:8265/api/serve/applications/"
        return self.clients.call(method, url, headers=headers, **more)

    # ------------------------------------------------------------ what there is

    def actors(self, deployment: str, state: str = "RUNNING") -> dict[str, str]:
        """The replicas of a deployment in this state: the id to the address of the host."""
        answer = self._serve("GET")
        deployments = answer.json()["applications"].get("shoal", {}).get("deployments", {})
        known = deployments.get(deployment, {"replicas": []})["replicas"]
        return {each["replica_id"]: each["node_ip"] for each in known if each["state"] == state}

    def until_there_are(self, replicas: int, routers: int, but: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Waits for these numbers, without those of `but`, and until the HAProxies know the routers."""

        def there() -> bool:
            found = [self.actors(name) for name in ("Replica", "Router")]
            if [len(each) for each in found] != [replicas, routers] or but & {*found[0], *found[1]}:
                return False
            return all(self.sessions(host.address).keys() == found[1].keys() for host in self.entries())

        until(there, f"{replicas} replicas and {routers} routers")

    def entries(self) -> list[Host]:
        """Where Serve has HAProxies: on the head, and where there is anything else of it."""
        used = {self.net.hosts[0].address, *self.actors("Replica").values(), *self.actors("Router").values()}
        return [host for host in self.net.hosts if host.address in used]

    def begin_on_all(self, count: int, share: float = 1.0) -> list[Stream]:
        """Starts streams by all HAProxies in turn."""
        return [self.begin(host, share) for host in itertools.islice(itertools.cycle(self.entries()), count)]

    def sessions(self, address: str) -> dict[str, int]:
        """Requests that this host's HAProxy has at each router that it knows, by the router's id."""
        page = self.clients.call("GET", f"http://{address}:8404/stats;csv").text.removeprefix("# ")
        rows = [row for row in csv.DictReader(io.StringIO(page)) if row["pxname"] == "http-shoal"]
        mine = [row for row in rows if row["svname"].startswith("SERVE_REPLICA")]
        return {row["svname"].rsplit("-", 1)[1]: int(row["scur"]) for row in mine}

    def status(self, entry: Host, path: str) -> str:
        """The status of an answer to GET, or why there is none."""
        try:
            return str(self.clients.submit(lambda: self.get(entry, path)).result().status_code)
        except httpx.HTTPError as error:
            return repr(error)

    def get(self, entry: Host, path: str) -> httpx.Response:
        return httpx.get(f"http://{entry.address}:8000{path}", timeout=WAIT_S)

    def begin(self, entry: Host, share: float = 1.0) -> Stream:
        """Starts a stream by this host's HAProxy, and finds out which router answers. `share`: of a stream's length."""
        with self.quiet:
            before = self.sessions(entry.address)
            stream = self.clients.begin(entry.address, int(self.tokens * share))
            after = self.sessions(entry.address)
        (stream.router,) = [router for router, count in after.items() if count > before.get(router, 0)]
        return stream

    def end(self, streams: list[Stream]) -> None:
        for stream in streams:
            assert stream.future is not None
            stream.future.result(self.stream_s * 3 + WAIT_S)


# ---------------------------------------------------------------- what is done, and what came of it


@dataclass
class Figures:
    """| figure | meaning |
    | --- | --- |
    | `streams` | that came in by HAProxies and routers which no lost or drained host took with it |
    | `failed_requests` | of these, those that did not end whole |
    | `silent_ends` | of all but those by a lost host, those that ended without a word |
    | `failed_short_requests` | short ones while routers and replicas were changed, one after the other |
    | `reloaded_replicas` | that a change of numbers started although they ran |
    | `longest_gap_s` | without a token, of the streams above |
    | `killed_pods` | those that did not end within their grace |
    | `haproxies` | processes at most in one pod |
    | `haproxy_mb` | memory of the largest, in MB |
    """

    streams: int = 0
    failed_requests: int = 0
    silent_ends: int = 0
    failed_short_requests: int = 0
    short_requests: int = 0
    reloaded_replicas: int = 0
    longest_gap_s: float = 0.0
    haproxies: int = 0
    haproxy_mb: float = 0.0
    killed_pods: list[str] = field(default_factory=list)
    pre_stop_rc: list[int] = field(default_factory=list)
    pre_stop_s: list[float] = field(default_factory=list)
    without_worker: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    tell: Callable[[str], None] = field(default=print, repr=False)

    def failed(self, what: str) -> None:
        self.failures.append(what)
        self.tell(what)

    def told(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "tell"}


@contextlib.contextmanager
def asking(rehearsal: Rehearsal, entry: Host, figures: Figures) -> Iterator[None]:
    """A client that asks short questions meanwhile."""
    stop = threading.Event()

    def ask() -> None:
        body = {"model": "tiny", "prompt": "short", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        while not stop.wait(0.2):
            figures.short_requests += 1
            try:
                url = f"http://{entry.address}:8000/v1/completions"
                with rehearsal.quiet:
                    answer = httpx.post(url, json=body, timeout=WAIT_S)
                how = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
            except httpx.HTTPError as error:
                how = repr(error)
            if how:
                figures.failed_short_requests += 1
                figures.failed(f"short, at {time.monotonic() - rehearsal.began:.1f} s: {how}")

    asked = rehearsal.clients.submit(ask)
    try:
        yield
    finally:
        stop.set()
        asked.result()


def rehearse(r: Rehearsal) -> Figures:
    """Every change, under streams."""
    figures = Figures(tell=r.say)
    head, one, two = r.net.hosts
    before = {host.name: (host.files(), set(host.ports())) for host in r.net.hosts}
    rendered = render(r.values(2, 1))
    for host in r.net.hosts:
        r.start(host, rendered)
    r.deploy(rendered)
    r.until_there_are(2, 1)
    r.say("deployed")

    with asking(r, head, figures):
        kept, streams = set(r.actors("Replica")), r.begin_on_all(4)
        r.deploy(render(r.values(4, 2)))
        r.until_there_are(4, 2)
        figures.reloaded_replicas += len(kept - set(r.actors("Replica")))
        r.say("replicas 2 to 4, routers 1 to 2")
        kept, streams = set(r.actors("Replica")), [*streams, *r.begin_on_all(4)]
        r.deploy(render(r.values(1, 1)))
        r.until_there_are(1, 1)
        figures.reloaded_replicas += len(set(r.actors("Replica")) - kept)
        r.say("replicas 4 to 1, routers 2 to 1")
        kept = {*r.actors("Replica"), *r.actors("Router")}
        r.deploy(render(r.values(3, 2, max_prompts=255)))
        r.until_there_are(3, 2, but=kept)
        r.say("another version")
        look(r, figures)
        text = undisturbed(r.model, r.tokens)
        r.end(streams)
        r.say("streams over all of that have ended")
    count(figures, streams, text)

    # The pod of one host is lost, and KubeRay makes another in its place.
    streams = r.begin_on_all(6, SHORTER)
    taken = {"Router": r.actors("Router"), "Replica": r.actors("Replica")}
    # Both have replicas, and the other a router.
    if one.address not in taken["Router"].values():
        one, two = two, one
    assert {one.address, two.address} == {*taken["Replica"].values()}
    two.vanish()
    r.say("a host is lost")
    lost = [s for s in streams if two.address in (s.entry, taken["Router"].get(s.router))]
    # A new pod has another address. Ray crashes at one of which the head still knows other processes.
    until(lambda: two not in r.entries(), "the host is missed")
    two.start()
    r.start(two, rendered)
    gone = {each for found in taken.values() for each, address in found.items() if address == two.address}
    r.until_there_are(3, 2, but=gone)
    r.say("as many as before")
    r.deploy(render(r.values(1, 3, max_prompts=255)))
    r.until_there_are(1, 3)
    r.say("replicas 3 to 1, routers 2 to 3")

    # The pod with the replica is drained.
    one, two = (one, two) if one.address in r.actors("Replica").values() else (two, one)
    more = [r.begin(head, SHORTER) for _ in range(4)]
    routers = r.actors("Router")
    drained = [s for s in [*streams, *more] if one.address in (s.entry, routers.get(s.router, one.address))]
    with asking(r, head, figures):
        stop(r, figures, one.name)
        r.until_there_are(1, 3)
        r.say("a drained pod has ended")
    r.end([*streams, *more])
    stayed = [s for s in [*streams, *more] if s not in lost and s not in drained]
    count(figures, stayed, text)
    for stream in drained:
        if stream not in lost and not stream.is_whole(text) and stream.error is None:
            figures.silent_ends += 1
            figures.failed(f"silent: {stream.told()}")

    # The last worker is lost, and then helm uninstall.
    two.vanish()
    until(lambda: not r.sessions(head.address), "the head's HAProxy has no router")
    figures.without_worker = {path: r.status(head, path) for path in ("/v1/models", "/ready", "/-/healthz")}
    r.say(f"no worker: {figures.without_worker}")
    end(r, figures, "head")
    for host in r.net.hosts:
        files, ports = before[host.name]
        left = [*host.processes().values(), *map(str, host.ports() - ports), *(host.files() - files)]
        # The volume stays. A container's home folder and what Python compiles of the image go with the container.
        kept = [each for each in left if each.startswith(("cache/", "home/shoal/")) or "__pycache__" in each]
        figures.left += [f"{host.name}: {each}" for each in left if each not in kept]
    figures.seconds = time.monotonic() - r.began
    r.say("nothing runs any more")
    return figures


def stop(r: Rehearsal, figures: Figures, name: str) -> None:
    """Ends a pod as the kubelet does."""
    pod, began = r.pods[name], time.monotonic()
    done = pod.pre_stop()
    figures.pre_stop_s.append(round(time.monotonic() - began, 1))
    figures.pre_stop_rc.append(done.returncode)
    r.say(f"preStop of {name}: {done.returncode} after {figures.pre_stop_s[-1]} s {done.stdout}{done.stderr}")
    end(r, figures, name)


def end(r: Rehearsal, figures: Figures, name: str) -> None:
    if not r.pods.pop(name).terminate():
        figures.killed_pods.append(name)


def count(figures: Figures, streams: list[Stream], text: str) -> None:
    figures.streams += len(streams)
    for stream in streams:
        if not stream.is_whole(text):
            figures.failed_requests += 1
            figures.failed(stream.told())
        figures.longest_gap_s = round(max(figures.longest_gap_s, stream.gap_s), 2)


def look(r: Rehearsal, figures: Figures) -> None:
    """How many HAProxies there are in a pod, and what they hold."""
    for host in r.entries():
        running = [process for process, line in host.processes().items() if "haproxy -" in line]
        figures.haproxies = max(figures.haproxies, len(running))
        sizes = [int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096 / 1e6 for process in running]
        figures.haproxy_mb = round(max([figures.haproxy_mb, *sizes]), 1)


def rehearsed(folder: Path, stream_s: float, drain_s: float, tell: Callable[[str], None] = print) -> Figures:
    """A whole rehearsal in a folder, which must be empty."""
    model = made_model(folder)
    with network(folder, ["head", "one", "two"], shown(model)) as net:
        r = Rehearsal(net, model, stream_s, drain_s, tell)
        try:
            return rehearse(r)
        finally:
            r.clients.close()


if __name__ == "__main__":
    sys.exit(
        command(str(__doc__), lambda folder, its: rehearsed(folder, its.stream_s, its.drain_s).told(), drain_s=5.0)
    )
