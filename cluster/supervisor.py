"""`python -m cluster.supervisor`: keeps Ray, and on the head `shoal serve`, running on a machine of `ray up`.

| command | what it does |
| --- | --- |
| `head ARGUMENTS` | starts the supervisor of the head; the arguments are those of `shoal serve` |
| `worker ADDRESS` | starts the supervisor of another machine, which joins that head |
| `prepare LOCK` | stops the machine if the file pins another Ray than the one that runs |
| `stop` | ends the supervisor, the server and Ray, at once |
| `run` | the supervisor itself |

A start where a supervisor runs already leaves Ray alone: the supervisor takes over the new arguments and the new code,
and the head's starts a new `shoal serve`, which takes over the server that runs (`cluster.launch`).

The supervisor starts again what ends. It runs as a unit of the user's systemd where there is one, which also starts it
when the machine does; else as a process of its own, which cron starts when the machine does, if there is cron.
"""

import contextlib
import ctypes
import getpass
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, Self

import msgspec
import psutil

from cluster.head_watch import HeadWatch
from worker.folders import replaced

PORT = 6379  # of Ray, on the head
LOG = "shoal.log"  # of the supervisor and of `shoal serve`, in the home folder
FOLDER = ".shoal"  # of the supervisor, in the home folder
UNIT = "shoal.service"
CRON = "@reboot {python} -m cluster.supervisor run < /dev/null > /dev/null 2>&1  # shoal"
LOOK_S = 1.0
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0  # before something that has ended starts again: doubled each time
POLL_S = 0.2
STEADY_S = 60.0  # what has run this long has started well
UP_S = 330.0  # that Ray may take to start
OPEN_FILES = 65536
HEART = {"head": ("gcs_server", "raylet"), "worker": ("raylet",)}  # the processes that Ray cannot run without
# What Ray and the server get besides the environment of the login. Ray's workers have a low priority by default.
# Ray's second autoscaler does not know machines of one's own. On a busy machine a start takes longer than Ray waits.
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
    "RAY_enable_autoscaler_v2": "0",
    "RAY_raylet_start_wait_time_s": "300",
    # Seconds without a sign of a machine, after which the head logs in there again: where Ray runs, nothing happens.
    "AUTOSCALER_HEARTBEAT_TIMEOUT_S": "10",
    # `ray down` removes the folder of Ray, and with it what killed processes leave in theirs.
    "RAY_TMPDIR": "/tmp",
    "TMPDIR": "/tmp/ray/tmp",
}
OF_A_LOGIN = re.compile("SSH_.*|XDG_SESSION.*|_|PWD|OLDPWD|SHLVL|TERM")
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>

Role = Literal["head", "worker"]


class Machine(msgspec.Struct):
    """A machine as its last start has described it. `head`: the address of the head for a worker.
    `arguments`: of `shoal serve`. `environment`: of the login that has started it."""

    role: Role
    head: str
    arguments: list[str]
    environment: dict[str, str]

    @property
    def ray(self) -> list[str]:
        """The command that starts Ray."""
        if self.role == "worker":
            return [program("ray"), "start", f"--address={self.head}:{PORT}"]
        autoscaling = f"--autoscaling-config={Path.home() / 'ray_bootstrap_config.yaml'}"
        return [program("ray"), "start", "--head", f"--port={PORT}", autoscaling]


class _Stop(Exception):
    """SIGTERM."""


class _Restart(Exception):
    """SIGHUP: other arguments, or other code."""


def program(name: str) -> str:
    """The path of a program of this environment."""
    return str(Path(sys.executable).parent / name)


def folder() -> Path:
    return Path.home() / FOLDER


def unit_file() -> Path:
    """The unit of the user's systemd that runs the supervisor, where there is one."""
    return Path.home() / ".config/systemd/user" / UNIT


def say(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", flush=True)


# ---------------------------------------------------------------- what runs here


def processes(names: Sequence[str]) -> list[psutil.Process]:
    """Returns this user's processes of these names that `ray start` has made."""
    found = []
    for process in psutil.process_iter(["name", "uids", "cmdline", "status"]):
        info = process.info
        mine = info["uids"] is not None and info["uids"].real == os.getuid()
        lives = info["name"] in names and info["status"] != psutil.STATUS_ZOMBIE
        if mine and lives and any("/tmp/ray/" in word for word in info["cmdline"] or ()):
            found.append(process)
    return found


def up() -> Path:
    """A file that is there once Ray runs and nothing starts it any more."""
    return folder() / "up"


def ray_runs(role: Role) -> bool:
    return {process.info["name"] for process in processes(HEART[role])} == {*HEART[role]}


def stop_ray() -> "subprocess.CompletedProcess[str]":
    """Ends all of Ray on this machine."""
    command = [program("ray"), "stop", "--grace-period", "5"]
    environment = {**os.environ, **ENVIRONMENT}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def supervisor() -> psutil.Process | None:
    """The supervisor of this machine, if it runs."""
    with contextlib.suppress(OSError, ValueError, psutil.NoSuchProcess):
        process = psutil.Process(int((folder() / "pid").read_text()))
        if "cluster.supervisor" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


# ---------------------------------------------------------------- the supervisor itself


class Supervisor:
    """Starts what does not run, again and again."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._environment = {**os.environ, **machine.environment, **ENVIRONMENT}
        self._ray = _Turn()
        self._serve = _Turn()
        self._server: subprocess.Popen[bytes] | None = None
        self._head = HeadWatch(f"{machine.head}:{PORT}") if machine.role == "worker" else None

    @classmethod
    def read(cls) -> Self:
        return cls(msgspec.json.decode((folder() / "machine.json").read_bytes(), type=Machine))

    def run(self) -> NoReturn:
        """Raises _Stop and _Restart."""
        if (started := folder() / "ray").exists() and started.read_text() != version("ray"):
            say(f"Ray {started.read_text()} becomes {version('ray')}")
            stop_ray()
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            if self._head is not None and (news := self._head.look()) is not None:
                say(news)
            if self._has_ray() and self._machine.role == "head":
                self._look_at_server()
            if select.select([reader], [], [], LOOK_S)[0]:
                os.read(reader, 4096)

    def _has_ray(self) -> bool:
        """Whether Ray runs; starts it if it is time."""
        if ray_runs(self._machine.role):
            up().touch()
            self._ray.runs()
            return True
        if self._head is not None and self._head.is_lost:  # Ray could not start, and would say so again and again
            return False
        if not self._ray.due():
            return False
        self.end_server()
        stop_ray()
        say("starting Ray")
        Path(ENVIRONMENT["TMPDIR"]).mkdir(parents=True, exist_ok=True)
        (folder() / "ray").write_text(version("ray"))
        up().unlink(missing_ok=True)
        done = self._start_ray()
        if done is not None and done.returncode:
            say(f"Ray does not start: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return done is not None and done.returncode == 0

    def _start_ray(self) -> "subprocess.CompletedProcess[str] | None":
        """Starts Ray. Returns None if that was given up: `ray start` waits without an end for a raylet that has died
        meanwhile, as on a busy machine."""
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        deadline, seen = time.monotonic() + UP_S, set[str]()
        with subprocess.Popen(self._machine.ray, env=self._environment, **pipes) as starting:
            try:
                while time.monotonic() < deadline:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        out, err = starting.communicate(timeout=min(LOOK_S, UP_S))
                        return subprocess.CompletedProcess(starting.args, starting.returncode, out, err)
                    there = {process.info["name"] for process in processes(HEART[self._machine.role])}
                    if ended := seen - there:
                        why = _last_words()
                        say(f"{' and '.join(sorted(ended))} ended while Ray was started, which begins again{why}")
                        return None
                    seen |= there
                say(f"Ray has not started within {UP_S:g} s, and is started again")
                return None
            finally:
                starting.kill()

    def _look_at_server(self) -> None:
        """Starts `shoal serve` unless it runs, was stopped on purpose (0), or has a wrong configuration (2)."""
        if self._server is not None and (code := self._server.poll()) is not None:
            self._server = None
            if code in (0, 2):
                say("shoal serve has ended" + (": mend the configuration, then run ray up" if code else ""))
                self._serve.stop()
            else:
                say(f"shoal serve has ended with {code}")
        if self._server is not None:
            self._serve.runs()
        elif self._serve.due():
            command = [program("shoal"), "serve", *self._machine.arguments]
            self._server = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent
            )

    def end_server(self, drain: bool = False) -> None:
        """Ends `shoal serve`: what it serves goes on. With `drain` it first ends that, within `drain_s`."""
        if self._server is not None:
            self._server.terminate() if drain else self._server.kill()
            self._server.wait()
            self._server = None


class _Turn:
    """When something that has ended may start again."""

    def __init__(self) -> None:
        self._wait_s = FIRST_WAIT_S
        self._next_s = 0.0
        self._since_s: float | None = None

    def due(self) -> bool:
        """Whether it may start now; if so, it counts as a start."""
        self._since_s = None
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s, self._wait_s = now + self._wait_s, min(2 * self._wait_s, MAX_WAIT_S)
        return True

    def runs(self) -> None:
        now = time.monotonic()
        self._since_s = self._since_s or now
        if now - self._since_s > STEADY_S:
            self._wait_s = FIRST_WAIT_S

    def stop(self) -> None:
        self._next_s = float("inf")


def _last_words() -> str:
    """Returns the end of the newest raylet's errors, for people; empty if there are none."""
    with contextlib.suppress(OSError):
        text = (Path(ENVIRONMENT["TMPDIR"]) / "ray/session_latest/logs/raylet.err").read_text(errors="replace")
        return f": {text[-2000:].strip()}" if text.strip() else ""
    return ""


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.set_wakeup_fd(-1)


def run() -> int:
    """Supervises until SIGTERM."""
    if (other := supervisor()) is not None and other.pid != os.getpid():
        print(f"a supervisor runs already, as process {other.pid}", file=sys.stderr)
        return 1
    (folder() / "pid").write_text(str(os.getpid()))
    log = os.open(Path.home() / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = OPEN_FILES if most == resource.RLIM_INFINITY else min(OPEN_FILES, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    signal.signal(signal.SIGTERM, _raise(_Stop))
    signal.signal(signal.SIGHUP, _raise(_Restart))
    one = Supervisor.read()  # now: SIGHUP comes after a change of the file
    try:
        one.run()
    except _Restart:
        one.end_server()
        os.execv(sys.executable, [sys.executable, "-m", "cluster.supervisor", "run"])
    except _Stop:
        say("stopping")
        one.end_server(drain=True)
        stop_ray()
        for name in ("pid", "ray"):
            (folder() / name).unlink(missing_ok=True)
    return 0


def _raise(exception: type[Exception]) -> Callable[[int, FrameType | None], NoReturn]:
    def handler(signum: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signum, signal.SIG_IGN)
        raise exception

    return handler


# ---------------------------------------------------------------- its commands


def start(machine: Machine) -> int:
    """Starts the supervisor, or hands it what is new. Returns once Ray runs; 1 if it does not within `UP_S`."""
    folder().mkdir(mode=0o700, exist_ok=True)
    with replaced(folder() / "machine.json") as file:
        file.touch(0o600)  # the environment may hold keys
        file.write_bytes(msgspec.json.encode(machine))
    if (running := supervisor()) is not None:
        print("a supervisor runs here already: Ray stays, and the supervisor takes over what has changed")
        running.send_signal(signal.SIGHUP)
    elif not _start_unit():
        _start_process()
    deadline = time.monotonic() + UP_S
    while not (supervisor() and ray_runs(machine.role) and up().exists()):
        if time.monotonic() > deadline:
            print(f"Ray has not started within {UP_S:g} s; the end of ~/{LOG}:", file=sys.stderr)
            print(*_tail(Path.home() / LOG), sep="\n", file=sys.stderr)
            return 1
        time.sleep(POLL_S)
    return 0


def _start_unit() -> bool:
    """Makes the supervisor a unit of the user's systemd, and starts it. Returns whether there is such a systemd."""
    if shutil.which("systemctl") is None or not Path("/run/systemd/system").is_dir():
        return False
    unit = unit_file()
    unit.parent.mkdir(parents=True, exist_ok=True)
    unit.write_text(
        f"""\
[Unit]
Description=Shoal: Ray and, on the head, the server

[Service]
ExecStart={sys.executable} -m cluster.supervisor run
ExecReload=/bin/kill -HUP $MAINPID
WorkingDirectory=%h
KillMode=mixed
Restart=always
RestartSec=1
# Answers have drain_s, however long that is.
TimeoutStopSec=infinity
LimitNOFILE={OPEN_FILES}

[Install]
WantedBy=default.target
"""
    )
    # Without lingering, the user's systemd would end with the login.
    if not _lingers():
        (folder() / "linger").touch()
    commands = ("loginctl enable-linger", "systemctl --user daemon-reload", f"systemctl --user enable --now {UNIT}")
    for command in commands:
        done = _to_systemd(command)
        if done.returncode:
            print(f"without systemd, for {command} failed: {done.stderr.strip()}")
            unit.unlink()
            return False
    return True


def _lingers() -> bool:
    """Whether the user's systemd starts with the machine and outlives logins."""
    return "yes" in _to_systemd(f"loginctl show-user --property=Linger {getpass.getuser()}").stdout


def _to_systemd(command: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command for the user's systemd, which a login over ssh may not know where to find."""
    os.environ.setdefault("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    return subprocess.run(command.split(), capture_output=True, text=True, check=False)


def _start_process() -> None:
    """Starts the supervisor as a process of its own, and has cron start it when the machine starts."""
    if not _change_cron(CRON.format(python=sys.executable)):
        print("neither systemd nor cron is here: after a restart of the machine, run ray up again")
    subprocess.Popen(
        [sys.executable, "-m", "cluster.supervisor", "run"],
        cwd=Path.home(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _change_cron(line: str | None) -> bool:
    """Puts the supervisor's line into the user's table of cron, or removes it. Returns whether there is cron."""
    if shutil.which("crontab") is None:
        return False
    listed = subprocess.run(["crontab", "-l"], capture_output=True, text=True, check=False)
    before = listed.stdout.splitlines() if listed.returncode == 0 else []
    others = [each for each in before if not each.endswith("# shoal")]
    after = [*others, *([line] if line else [])]
    if after == before:
        return True
    text = "".join(f"{each}\n" for each in after)
    return subprocess.run(["crontab", "-"], input=text, text=True, check=False).returncode == 0


def stop() -> int:
    """Ends the supervisor, `shoal serve` and Ray, at once, and removes what `start` has made."""
    if unit_file().exists():
        _to_systemd(f"systemctl --user kill --signal=KILL {UNIT}")
        _to_systemd(f"systemctl --user disable --now {UNIT}")
        unit_file().unlink()
        if (folder() / "linger").exists():
            _to_systemd("loginctl disable-linger")
    _change_cron(None)
    if (running := supervisor()) is not None:
        running.suspend()
        starting = running.children(recursive=True)  # `ray start`, as after `ray down` has stopped Ray
        for process in (running, *starting):
            process.kill()
        psutil.wait_procs([running, *starting])
    done = stop_ray()
    shutil.rmtree(folder(), ignore_errors=True)
    if left := processes(HEART["head"]):
        print(done.stdout, done.stderr, f"still runs: {', '.join(map(str, left))}", sep="\n", file=sys.stderr)
        return 1
    return 0


def prepare(lock: Path) -> int:
    """Stops a machine whose Ray is to be replaced, before anything of it is: answers that are on their way may end,
    within `drain_s`. Says so first, here and in the log."""
    pinned = re.search(r"^ray==([^\s;]+)", lock.read_text(), re.MULTILINE)
    running = supervisor()
    if running is None or pinned is None or pinned[1] == version("ray"):
        return 0
    told = f"Ray {version('ray')} becomes {pinned[1]}: a planned stop, for which answers get drain_s to end"
    print(told, flush=True)
    began = time.monotonic()
    with (Path.home() / LOG).open("a") as log, contextlib.redirect_stdout(log):
        say(told)
    # What only ended, systemd would start again, while pip replaces it.
    if not unit_file().exists() or _to_systemd(f"systemctl --user stop {UNIT}").returncode:
        running.terminate()
    running.wait()
    print(f"the machine has stopped after {time.monotonic() - began:.0f} s, and starts with Ray {pinned[1]}")
    return 0


def _tail(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines()[-20:] if file.exists() else []


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["run"]:
            return run()
        case ["stop"]:
            return stop()
        case ["prepare", lock]:
            return prepare(Path(lock))
        case ["head", *arguments]:
            if code := _check(arguments):
                return code
            return start(Machine("head", "", arguments, _environment()))
        case ["worker", address]:
            return start(Machine("worker", address, [], _environment()))
    print(__doc__, file=sys.stderr)
    return 2


def _check(arguments: Sequence[str]) -> int:
    """Whether `shoal serve` accepts the arguments: its exit code for them."""
    return subprocess.run([program("shoal"), "serve", "--check", *arguments], check=False).returncode


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not OF_A_LOGIN.fullmatch(name)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
