"""`shoal serve`: brings a server up, shows what it waits for, and leaves nothing behind.

Without an `address`, Ray is started on this machine for this server alone, and ends with it. With one, the application
is deployed on that Ray cluster, and removed again at the end. A server that runs there already, because its `shoal
serve` was killed, is taken over: as it is, or if the configuration or the code has changed, by replacing its processes.
"""

import contextlib
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentStatusTrigger as Trigger
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client as get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatus
from rich.console import Console

from cluster import joined, local
from cluster.app import application, deploy, numbers, router_deployment, settle
from cluster.config import Config, ConfigError, DeploymentConfig, upstream_keys
from cluster.conversion import ModelError
from cluster.deployed import APP, scale, targets
from cluster.followed_config import FollowedConfig, rescaled
from cluster.head_watch import HeadWatch
from cluster.joined import Deployed
from cluster.models import resolve, sampling_defaults, with_draft_folder
from cluster.room import Shortage, machines_of, shortage, told
from router.access.auth import Keys
from router.http.listener import certificate_of
from worker.config import AUTO_DTYPES

POLL_S = 0.2
START_S = 600.0  # that a server without replicas may take
ATTEND_S = 2.0  # between looks at a server that runs
LOOPBACK = ("127.0.0.1", "::1", "localhost")
ALL_INTERFACES = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to listen on, and where one of them is for this machine


class LaunchError(RuntimeError):
    """The server did not start, or has ended. The message is for the user as it stands."""


def serve(config: Config, console: Console | None = None, followed: FollowedConfig | None = None) -> int:
    """Serves until SIGINT or SIGTERM; with SIGTERM, answers that are on their way may end. `followed`: where the
    numbers of replicas and routers are read again. Returns the exit code: 1 if the server did not start or did not
    live."""
    launch = _Launch(config, console or Console(highlight=False), followed)
    signal.signal(signal.SIGINT, launch.interrupt)
    signal.signal(signal.SIGTERM, launch.interrupt)
    try:
        launch.start()
        launch.attend()
    except KeyboardInterrupt as interrupt:
        with contextlib.suppress(KeyboardInterrupt):  # a second one: nothing is waited for
            launch.interrupted(drain=isinstance(interrupt, _Terminated))
        return 0
    except _Stopped:
        launch.stopped()
        return 0
    except (LaunchError, ModelError, local.NoCluster, local.PortTaken, OSError) as error:
        launch.failed(error)
    except (RayError, RayServeException, RuntimeError, TimeoutError) as error:
        launch.failed(LaunchError(f"Ray does not come up, or does not answer: {_one_line(error)}"))
    finally:
        # A second Ctrl-C must not stop the cleanup halfway.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        launch.end()
    return 1


class _Stopped(Exception):
    """The server that was looked after has been ended by `shoal stop`, or in Ray."""


class _Terminated(KeyboardInterrupt):
    """SIGTERM: a service manager's way to end a server, where Ctrl-C is a person's."""


class _Launch:
    """A server from its start to its end, as seen from the terminal."""

    def __init__(self, config: Config, console: Console, followed: FollowedConfig | None = None) -> None:
        self._config = self._given = config
        self._followed = followed
        self._is_asked_to_read = False  # by SIGHUP
        self._interrupt: type[KeyboardInterrupt] | None = None  # the signal that has come
        self._runs = False
        self._console = console
        self._line = console.status("") if console.is_terminal else None
        self._said = ""
        self._begun = time.monotonic()
        self._folder: Path | None = None  # of the Ray that was started here
        self._watch: local.RayWatch | None = None  # over it
        self._port: socket.socket | None = None  # of this machine, held while routers come and go
        self._over = threading.Event()  # this process ends
        self._keeper: Any = None  # of a cluster that was joined: lets no other `shoal serve` look after it
        self._before: Deployed | None = None  # what runs on it already
        self._has_serve = False  # whether Ray Serve runs for this server alone
        self._deployed = False
        self._replaces = False  # what runs already, by another version
        self._short: Shortage | None = None  # as the user was last told

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handles SIGINT and SIGTERM."""
        self._interrupt = _Terminated if signum == signal.SIGTERM else KeyboardInterrupt
        self._obey()

    def _obey(self) -> None:
        """Raises the interrupt that has come: again, where Python had to ignore it, as in a hook around a fork."""
        if self._interrupt is not None:
            raise self._interrupt

    def start(self) -> None:
        """Returns when the server can answer. Raises LaunchError, ModelError, NoCluster, PortTaken, OSError."""
        try:
            Keys(self._config)
        except (OSError, ValueError) as error:
            raise LaunchError(f"api_key_file: {error}") from error
        try:
            certificate_of(self._config)
        except OSError as error:
            raise LaunchError(f"ssl_certfile, ssl_keyfile: {error}") from error
        try:
            upstream_keys(self._config)
        except ConfigError as error:
            raise LaunchError(str(error)) from None
        if self._config.address is None:
            local.check_port(self._config.host, self._config.port)
            self._port = local.hold_port(self._config.host, self._config.port)
            self._start_ray()
        else:
            self._join_ray(self._config.address)
        self._deploy()
        self._wait()
        if self._replaces:
            self._scale()  # those without room wait for it from now on
        if self._config.address is not None:
            self._record()
            if not self._config.router_hosts or _this_node() in self._config.router_hosts:
                # Not before: routers of another user, whose Ray it is, could not listen then.
                self._port = local.hold_port(self._config.host, self._config.port)
        self._greet()
        self._runs = True

    def attend(self) -> None:
        """Reports replicas that die and come back, and follows the configuration. Never returns; raises LaunchError
        once Ray is gone, and _Stopped once another command has ended the server."""
        if self._followed is not None:
            signal.signal(signal.SIGHUP, self._ask_to_read)
        seen, told = "", set[str]()
        while True:
            time.sleep(ATTEND_S)
            self._obey()
            try:
                self._follow()
                self._tell_room(_scaled_as(self._config, targets()))
                overview = _overview()
            except Exception as error:
                if self._config.address is not None and _is_stopped():
                    raise _Stopped from None
                raise LaunchError(f"Ray is gone: {error}") from error
            if overview is None:
                raise _Stopped
            now = _short(overview)
            ended = [] if self._folder is None else local.reasons(self._folder)
            news = [reason for reason in ended if reason not in told]
            if now != seen and seen:
                news.append(now)
            for line in news:
                self._print_now(line)
            seen = now
            told.update(ended)

    def _ask_to_read(self, signum: int, frame: FrameType | None) -> None:
        self._is_asked_to_read = True

    def _follow(self) -> None:
        """Takes over the numbers of replicas and routers from the configuration that is followed, if it changed."""
        if self._followed is None:
            return
        again, self._is_asked_to_read = self._is_asked_to_read, False
        try:
            new = self._followed.changed(again)
            if new is None:
                return
            config = rescaled(self._config, self._given, new)
            self._check_gpus(ray.cluster_resources().get("GPU", 0), config)
            self._reserve(config)
            self._tell_room(config, at_most=True)
        except (ConfigError, LaunchError) as error:
            self._print_now(f"the configuration stays as it is: {error}")
            return
        before, self._config = numbers(self._config), config
        for deployment, number in numbers(config).items():
            if before[deployment] != number:
                self._print_now(f"{deployment}: {before[deployment]} become {number}")
                scale(deployment, number)

    def stopped(self) -> None:
        self._quiet()
        self._print("the server was stopped")

    def failed(self, error: Exception) -> None:
        self._quiet()
        self._console.print(f"shoal: {error}", style="red", markup=False, soft_wrap=True)
        if self._folder is not None:
            self._console.print(f"Ray's logs stay in {self._folder} until the next start", markup=False)
            self._folder = None

    def interrupted(self, drain: bool) -> None:
        """Says that the server ends. With `drain`, and on a cluster that was joined, waits for answers that are on
        their way, as long as the routers do."""
        self._quiet()
        if not self._runs or not (drain or self._config.address):
            self._print("stopping; answers that are on their way are cut off")
            return
        self._print(f"stopping; answers that are on their way get {self._config.drain_s:g} s to end (Ctrl-C: none)")
        try:
            joined.end_application(self._config.drain_s)
        except Exception as error:  # of many kinds
            self._print(f"Ray is gone: {error}")

    def end(self) -> None:
        """Takes everything down that `start` brought up, however far it came. A server that ran before goes on if it
        was not taken over to the end."""
        self._quiet()
        self._over.set()
        if self._watch is not None:
            self._watch.stop()
        if self._config.address is None:
            local.end()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            return
        if self._before is not None and not self._runs:
            self._print("what ran on the cluster before goes on, as far as it runs")
        elif self._deployed:
            joined.end()
        ray.shutdown()

    # ------------------------------------------------------------ the steps of a start

    def _start_ray(self) -> None:
        # No live status line yet: a download shows its own progress.
        for deployment in self._config.deployments:
            folder = resolve(
                deployment.model,
                progress=self._print,
                weights=deployment.load_format != "dummy",
                dequantize=deployment.dequantize,
            )
            self._tell_defaults(folder, deployment)
            if deployment.num_ranks > 1:
                _check_cut(folder, deployment)
            if deployment.draft_model is not None:
                _check_draft(folder, with_draft_folder(deployment, self._print))
        self._config = local.fit(self._config)
        if (token := local.open_token()) is not None:
            self._print(f"other users of this machine can read {token}, with which they may run code: chmod 600 it")
        self._say("starting Ray")
        self._folder = local.make_folder()
        self._watch = local.RayWatch(lambda why: self.failed(LaunchError(f"Ray is gone: {why}")))
        try:
            local.start(self._config, self._folder, grows=self._followed is not None)
        except Exception as error:  # of many kinds, `Exception` among them
            raise LaunchError(
                f"Ray does not start ({_one_line(error)}): on a busy machine, try again; else Ray's logs say more"
            ) from error

    def _tell_defaults(self, folder: Path, deployment: DeploymentConfig) -> None:
        """Prints a model's sampling defaults. Raises LaunchError for a broken file: the replicas would fail on it
        too, but later."""
        try:
            defaults = sampling_defaults(deployment.model, folder, deployment.sampling_defaults)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        for problem in defaults.problems:
            self._print(problem)
        if defaults.values:
            which = "the model" if len(self._config.deployments) == 1 else deployment.name
            self._print(f"where a request does not say how to sample, {which} does ({defaults.source}): {defaults}")

    def _join_ray(self, address: str) -> None:
        self._say(f"joining the Ray cluster at {address}")
        local.join_or_tell(address)
        head = HeadWatch(ray.get_runtime_context().gcs_address)
        threading.Thread(target=head.follow, args=(self._print_now, self._lose_head, self._over), daemon=True).start()
        try:
            self._keeper = joined.keep()
        except joined.Kept as error:
            raise LaunchError(str(error)) from None
        hosts = self._config.router_hosts
        if hosts and _this_node() not in hosts and self._config.host in LOOPBACK:
            raise LaunchError(
                f"host={self._config.host}: only the machines of router_hosts would reach their routers, and this is "
                f"none of them: set host to {next(iter(ALL_INTERFACES))}"
            )
        if joined.runs():
            self._before = joined.deployed()
            if self._before is None:
                raise LaunchError(
                    f"the Ray cluster at {address} already runs Shoal, deployed by another program: stop that first"
                )
        elif not self._config.router_hosts:
            local.check_port(self._config.host, self._config.port)

    def _lose_head(self) -> None:
        """Ends this process: its calls of Ray would wait until Ray ends it, without a word."""
        self.failed(LaunchError("Ray is gone: its head does not answer. What runs on other machines cannot be changed"))
        os._exit(1)

    def _deploy(self) -> None:
        signal.signal(signal.SIGTERM, self.interrupt)  # Ray has put its own handler in place of ours
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        before = self._before
        if before is not None:
            self._config = _as_before(self._config, before.devices)
        self._config, note = settle(self._config, gpus=ray.cluster_resources().get("GPU", 0))
        if note:
            self._print(note)
        if self._config.address is None:
            self._config = local.share_memory(self._config)
        self._check_gpus(ray.cluster_resources().get("GPU", 0), self._config)
        if before is None:
            self._say("starting Ray Serve")
        self._has_serve = (before and before.has_serve) or get_global_client(False) is None
        self._deployed = True
        self._reserve(self._config)
        self._tell_room(self._config, at_most=True)
        config = self._config
        spare: set[str] = set()
        if before is not None:
            changes = before.changes(self._given)
            if before.build == joined.build() and not changes:
                self._print("the server that runs is taken over as it is")
                self._scale()
                return
            why = f"changed: {', '.join(changes)}" if changes else "another version of Shoal"
            self._print(f"the server that runs is replaced, some processes at a time ({why})")
            self._replaces = True
            self._config = _scaled_as(self._config, targets())
            spare = joined.with_room(self._config)
            # The first replica of a new version would wait for room that the old ones hold, and they for it.
            config = _with_room(self._config, self._shortage(self._config))
        elif self._config.address is not None:
            self._record()
        deploy(application(config, config.router_hosts or [_this_node()], spare=spare))

    def _record(self) -> None:
        """Tells the next `shoal serve` what runs."""
        Deployed.of(self._given, self._config, self._has_serve).write()

    def _reserve(self, config: Config) -> None:
        """Reserves the CPUs of routers. Raises LaunchError."""
        hosts = config.router_hosts or (_this_node(),)
        try:
            missing = joined.reserve(dict.fromkeys(hosts, config.num_routers), config.cpus_per_router)
        except joined.NoRoom as error:
            raise LaunchError(str(error)) from None
        if missing:
            self._print(f"router_hosts: not in the cluster yet: {', '.join(missing)}")

    def _tell_room(self, config: Config, at_most: bool = False) -> None:
        """Prints what a cluster that was joined lacks, if that changed. `at_most`: or what autoscaling may lack."""
        short = self._shortage(config)
        if short is not None and (self._short is None or _room(short) != _room(self._short)):
            self._print_room(told(short, config))
        elif short is None and at_most and (most := self._shortage(config, most=True)) is not None:
            self._print_room(told(most, config, most=True))
        self._short = short

    def _print_room(self, text: str) -> None:
        (self._print_now if self._runs else self._print)(text)

    def _shortage(self, config: Config, most: bool = False) -> Shortage | None:
        """Returns what a cluster that was joined lacks; None for one that was started here, with enough."""
        if config.address is None:
            return None
        routers = dict.fromkeys(config.router_hosts or (_this_node(),), config.num_routers)
        return shortage(config, machines_of(ray.nodes()), routers, most)

    def _fits(self) -> dict[str, int]:
        """How many have room of each deployment in Serve for which the cluster has too little. While processes are
        replaced, these are those of which nothing has room."""
        config = self._config
        there = machines_of(ray.nodes()) if config.router_hosts else {}
        found = {router_deployment(config, host): 0 for host in config.router_hosts if host not in there}
        if (short := self._shortage(config)) is not None:
            with_room = _with_room(config, short)
            for each, there_is in zip(config.deployments, with_room.deployments, strict=True):
                number = there_is.replicas if each.name not in self._without_room(short) else 0
                if number < each.replicas and not (self._replaces and number):
                    found[config.deployment_name(each)] = number
        return found

    def _without_room(self, short: Shortage | None) -> frozenset[str]:
        """The models of which no replica has room, while those of others have: these are served."""
        if short is None or not any(short.placed.values()):
            return frozenset()
        return frozenset(name for name, number in short.placed.items() if not number)

    def _is_ready(self, without: frozenset[str] = frozenset()) -> bool:
        return _is_ready(f"{self._url}/ready", self._config, without)

    def _serves(self, overview: ApplicationStatusOverview | None) -> bool:
        """Whether all runs in Serve that has room."""
        if overview is None or overview.status == ApplicationStatus.RUNNING:
            return overview is not None
        fits, there = self._fits(), overview.deployments
        running = {name: each.replica_states.get(ReplicaState.RUNNING, 0) for name, each in there.items()}
        return numbers(self._config).keys() <= there.keys() and all(
            each.status == DeploymentStatus.HEALTHY or running[name] >= fits.get(name, math.inf)
            for name, each in there.items()
        )

    def _scale(self) -> None:
        """Tells Serve the numbers of the configuration, but for what autoscaling chooses."""
        now = targets()
        for deployment, number in numbers(_scaled_as(self._config, now)).items():
            if now[deployment] != number:
                scale(deployment, number)

    def _check_gpus(self, there: float, config: Config) -> None:
        """Raises LaunchError if this machine has too few GPUs. A cluster may grow (`_tell_room`)."""
        models = [deployment for deployment in config.deployments if deployment.device == "cuda"]
        needed = sum(model.most_replicas * model.num_ranks * model.gpus_per_rank for model in models)
        if config.address is None and needed > there:
            which = " and ".join(
                f"{'max_' if model.max_replicas else ''}replicas={model.most_replicas} of tp={model.tp}, pp={model.pp}"
                + (f" of {model.name}" if len(config.deployments) > 1 else "")
                for model in models
            )
            raise LaunchError(
                f"{which} need {needed:g} GPUs, and this machine has {there:g}: "
                + ("lower one of them" if there else "device cpu needs none")
            )

    def _wait(self) -> None:
        within_s = max((deployment.start_timeout_s for deployment in self._config.deployments), default=START_S)
        if self._before is not None:  # replicas are replaced one after the other, and end before their places are free
            most = max((deployment.most_replicas for deployment in self._config.deployments), default=1)
            within_s = most * (within_s + self._config.drain_s)
        deadline = time.monotonic() + within_s
        while True:
            overview = _overview()
            self._tell_room(self._config)
            if self._serves(overview) and self._is_ready(self._without_room(self._short)):
                return
            if reason := _failure(overview):
                raise LaunchError(reason)
            if time.monotonic() > deadline:
                if not self._replaces and self._is_ready():
                    # Others have what it lacks, or a machine came late: what serves goes on.
                    self._print(f"after start_timeout_s={within_s:g} not all serve: {_short(overview)}")
                    return
                raise LaunchError(f"not ready after start_timeout_s={within_s:g}: {_short(overview)}")
            waited_for = ", ".join(deployment.model for deployment in self._config.deployments) or "the routers"
            self._say(f"waiting for {waited_for}: {_short(overview)}")
            time.sleep(POLL_S)

    def _greet(self) -> None:
        self._quiet()
        # Without max_tokens a small model may go on for minutes; sampled at random, its text is often nonsense.
        example = {"max_tokens": 100, "temperature": 0, "messages": [{"role": "user", "content": "Hello!"}]}
        names = [entry.name for entry in self._config.entries]
        body = json.dumps({"model": names[0]} | example)
        key = " -H 'Authorization: Bearer YOUR_KEY'" if self._config.api_key or self._config.api_key_file else ""
        self._print(f"\nReady after {time.monotonic() - self._begun:.0f} s")
        loads = _loads(f"{self._url}/state", self._config)
        for deployment in self._config.deployments:
            placed = None if self._short is None else self._short.placed[deployment.name]
            self._print(f"  {deployment.name}: {derived(deployment, loads.get(deployment.name, ()), placed)}")
        urls = self._urls()
        self._print(f"\nShoal serves {', '.join(names)} at {' and '.join(f'{url}/v1' for url in urls)}\n")
        self._print(f"  live page: {urls[0]}/")
        self._print(f"  chat: shoal chat --url {urls[0]}")
        self._print(f"  curl {urls[0]}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n")
        if self._folder is not None:
            self._print(f"Logs are in {local.logs(self._folder)} until it ends.\n")
        self._print(self._how_to_stop())

    def _urls(self) -> list[str]:
        """The addresses at which clients reach routers."""
        if self._config.address is None or self._config.host not in ALL_INTERFACES:
            return [self._url]
        return [self._url_of(host) for host in self._router_hosts() or [_this_node()]]

    def _how_to_stop(self) -> str:
        if self._config.address is None:
            return "Ctrl-C stops it."
        others = "`shoal stop` on a machine of the cluster"
        return f"Ctrl-C stops it, and so does {others}." if self._line is not None else f"{others} stops it."

    @property
    def _url(self) -> str:
        """The address at which this process reaches routers."""
        host = ALL_INTERFACES.get(self._config.host, self._config.host)
        if host != self._config.host and self._config.router_hosts and _this_node() not in self._config.router_hosts:
            host = self._router_hosts()[0]
        return self._url_of(host)

    def _router_hosts(self) -> list[str]:
        """The machines of routers, first those that are in the cluster: another may join later, or never."""
        there = machines_of(ray.nodes()) if self._config.router_hosts else {}
        return sorted(self._config.router_hosts, key=lambda host: host not in there)

    def _url_of(self, host: str) -> str:
        host = f"[{host}]" if ":" in host else host
        return f"http{'s' if self._config.ssl_certfile else ''}://{host}:{self._config.port}"

    # ------------------------------------------------------------ the terminal

    def _say(self, text: str) -> None:
        """Shows what is being waited for: as a live line on a terminal, elsewhere as a new line whenever it changes."""
        self._obey()
        if self._line is not None:
            self._line.update(text)
            self._line.start()
        elif text != self._said:
            self._print(text)
        self._said = text

    def _quiet(self) -> None:
        if self._line is not None:
            self._line.stop()

    def _print_now(self, text: str) -> None:
        """Prints a line with the time."""
        self._print(f"{time.strftime('%H:%M:%S')} {text}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def _check_cut(folder: Path, config: DeploymentConfig) -> None:
    """Raises LaunchError for a model whose layers or heads cannot be divided among the ranks: the ranks would fail on
    it too, but later, and again and again."""
    # Imported only here: it takes seconds.
    from worker.models.config import decoder_config, read_config
    from worker.models.sharding import Shard

    try:
        Shard(
            decoder_config(read_config(folder)),
            size=config.tp,
            stages=config.pp,
            cut=config.cut,
            expert_parallel=config.enable_expert_parallel,
        )
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _check_draft(folder: Path, config: DeploymentConfig) -> None:
    """Raises LaunchError for a draft model of another vocabulary: the replicas would fail on it too, but later."""
    from worker.models.draft_vocabulary import check_draft_model

    try:
        check_draft_model(Path(str(config.draft_model)), folder)
    except ValueError as error:
        raise LaunchError(str(error)) from None


def _one_line(error: Exception) -> str:
    """The last line of an error of Ray's, without the stacks of its processes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no more is known'}"


def _is_stopped() -> bool:
    """Whether Ray is there, and nothing of Shoal is deployed on it."""
    with contextlib.suppress(Exception):  # of many kinds
        return joined.deployed() is None
    return False


def _as_before(config: Config, devices: Mapping[str, str]) -> Config:
    """The configuration with the devices that run already for those that it leaves open: machines that have them may be
    away for a moment."""

    def change(deployment: DeploymentConfig) -> DeploymentConfig:
        device = devices.get(deployment.name, deployment.device) if deployment.device == "auto" else deployment.device
        return deployment.model_copy(update={"device": device})

    return config.changed(change)


def _with_room(config: Config, short: Shortage | None) -> Config:
    """The configuration with the replicas that have room, one of each model at least."""

    def change(deployment: DeploymentConfig) -> DeploymentConfig:
        placed = deployment.replicas if short is None else max(1, short.placed[deployment.name])
        return deployment.model_copy(update={"replicas": min(deployment.replicas, placed)})

    return config.changed(change).model_copy(update={"routers": config.num_routers})


def _room(short: Shortage) -> tuple[Mapping[str, int], Mapping[str, int]]:
    return short.wanted, short.placed


def _scaled_as(config: Config, targets: Mapping[str, int]) -> Config:
    """The configuration with as many replicas as there are of models whose number autoscaling chooses."""

    def change(deployment: DeploymentConfig) -> DeploymentConfig:
        there = targets.get(config.deployment_name(deployment))
        if deployment.max_replicas is None or there is None:
            return deployment
        number = min(max(there, deployment.min_replicas), deployment.max_replicas)
        return deployment.model_copy(update={"replicas": number})

    return config.changed(change)


def _this_node() -> str:
    """The address of this machine, as Ray knows it."""
    mine = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == mine)


def _overview() -> ApplicationStatusOverview | None:
    return ray_serve.status().applications.get(APP)


def _short(overview: ApplicationStatusOverview | None) -> str:
    """A summary, `Router: 1 running; Replica: 1 running, 1 starting`, and why a replica cannot start yet."""
    if overview is None or not overview.deployments:
        return "starting"
    parts = []
    for name, deployment in sorted(overview.deployments.items(), reverse=True):
        counts = [f"{count} {state.lower()}" for state, count in deployment.replica_states.items() if count]
        parts.append(f"{name}: {', '.join(counts) or 'none'}")
    # Serve's words for replicas that no node has room for.
    pending = [d.message.splitlines()[0] for d in overview.deployments.values() if "to be scheduled" in d.message]
    return "; ".join(parts + sorted(map(_in_order, pending)))


def _in_order(message: str) -> str:
    """A message of Serve's with the resources in it by name: Ray writes them in the order of a table, which changes."""
    return re.sub(r"{([^{}]*)}", lambda table: f"{{{', '.join(sorted(table[1].split(', ')))}}}", message)


def _failure(overview: ApplicationStatusOverview | None) -> str | None:
    """Why the application does not start: the exception that ended a replica, without Ray's stack around it."""
    if overview is None:
        return None
    deployments = overview.deployments.values()
    messages = [deployment.message for deployment in deployments]
    # Of a machine that was lost: Serve puts other replicas in the places of those that had started, or were about to.
    lost = [d for d in deployments if d.status_trigger == Trigger.HEALTH_CHECK_FAILED or "ActorDiedError" in d.message]
    has_failed = overview.status == ApplicationStatus.DEPLOY_FAILED and not lost
    if not has_failed and not any("failed to start" in d.message for d in deployments if d not in lost):
        return None
    text = "\n".join([*messages, overview.message])
    if named := re.findall(r"ReplicaError: (.+)", text):
        of = [name for name, deployment in overview.deployments.items() if named[-1] in deployment.message]
        return f"{of[0]}: {named[-1]}" if len(messages) > 2 and of else named[-1]
    lines = [line.strip() for line in text.splitlines() if re.match(r"\s*[\w.]+(Error|Exception)\b", line)]
    return lines[-1] if lines else text


def derived(config: DeploymentConfig, loads: Sequence[Mapping[str, Any]], placed: int | None = None) -> str:
    """The values that follow from a model's settings and the machine, for people: `2 replicas on cpu, float32, 4,096 KV
    tokens each, 3 threads a rank`. `loads`: of its replicas, as `/state` has them. `placed`: how many have room, where
    the cluster has too little."""
    of = "" if placed is None or placed >= config.replicas else f"{placed} of "
    parts = [f"{of}{config.replicas} replica{'s' * (config.replicas != 1)} on {config.device}"]
    parts.append(AUTO_DTYPES.get(config.device, "auto") if config.dtype == "auto" else config.dtype)
    if tokens := [load["kv_tokens_total"] for load in loads]:
        parts.append(f"{min(tokens):,} KV tokens{' each' * (len(tokens) > 1)}")
    if config.device == "cpu":
        parts.append(f"{config.cpu_threads or max(1, int(config.cpus_per_rank or 1))} threads a rank")
    return ", ".join(parts)


def _loads(url: str, config: Config) -> dict[str, list[dict[str, Any]]]:
    """The loads of the replicas of each model by its name, as far as a router tells them without a key of a file."""
    try:
        models = _asked(url, config)["models"]
    except (OSError, ValueError):
        return {}
    return {it["name"]: [each["load"] for each in it["replicas"] if each["load"]] for it in models}


def _is_ready(url: str, config: Config, without: frozenset[str] = frozenset()) -> bool:
    """Whether each model that replicas serve has one that a router has reached, but for those that sleep by now, and
    for `without`."""
    excused = without | {deployment.name for deployment in config.deployments if deployment.may_sleep}
    try:
        return all(number or name in excused for name, number in _asked(url, config)["models"].items())
    except (OSError, ValueError):
        return False


def _asked(url: str, config: Config) -> Any:
    """A router's answer. Raises OSError and ValueError. The router's certificate is for the name that clients use, and
    the address here is another one, of this machine: so nothing is verified."""
    request = urllib.request.Request(url)
    if config.api_key is not None:
        request.add_header("Authorization", f"Bearer {config.api_key.get_secret_value()}")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(request, timeout=2, context=context) as response:
        return json.load(response)
