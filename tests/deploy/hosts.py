"""Hosts on one machine: each has a network address, processes, a file system and an sshd of its own.

A host sees this machine's files, and what it writes lies in a folder of its own (an overlay), so that what is left of a
server there can be listed. Its first process ends everything in it, as a loss of power does. All hosts are joined by a
bridge in a network namespace, which is nobody else's: `Network.command` runs a program there, as on the operator's
machine. Needs root, `ip` and sshd. Hosts may have a systemd of their own, where this machine has one.
"""

import contextlib
import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

HOST_SCRIPT = Path(__file__).parent / "host.sh"
SUBNET = "10.231.7"  # of a namespace: no address of this machine can be in its way
USER = "ops"  # whose logins are an operator's
OPERATOR = f"{SUBNET}.1"
WAIT_S = 60.0
CLONE_NEWNET = 0x40000000  # <sched.h>
SYSTEMD = "/lib/systemd/systemd"
SYSTEM = ("sshd", "/usr/sbin/sshd", "/lib/systemd/", "/usr/bin/dbus-daemon", "/usr/lib/polkit-1/", "(sd-pam)")
PAM_SYSTEMD = "security/pam_systemd.so"  # tells systemd of logins


def missing() -> str | None:
    """Why there can be no hosts here; None if there can be."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are namespaces, which need root on Linux"
    if lacking := [name for name in ("ip", "unshare", "nsenter", "sshd", "rsync") if _program(name) is None]:
        return f"hosts need {', '.join(lacking)} (Debian: iproute2, openssh-server, rsync)"
    probe = "cd /mnt && mount -t tmpfs none . && cd /mnt && mkdir u w m && "
    probe += "mount -t overlay none -o lowerdir=/etc,upperdir=u,workdir=w m"
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe], capture_output=True)
    return None if done.returncode == 0 else f"no namespaces here: {done.stderr.decode().strip()}"


def cgroups() -> Path | None:
    """The cgroups of this machine of which hosts with systemd get a part; None if hosts can have no systemd."""
    has_systemd = os.access(SYSTEMD, os.X_OK) and any(Path("/lib").glob(f"*/{PAM_SYSTEMD}"))
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    found = [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2" and os.access(fields[1], os.W_OK)]
    return found[0] if has_systemd and found else None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")


def run(*command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True, **options)  # type: ignore[call-overload]


@dataclass
class Host:
    """One of a `Network`'s hosts. `folder` holds what it has written."""

    network: "Network"
    name: str
    number: int
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    cgroup: Path | None = None

    @property
    def address(self) -> str:
        return f"{SUBNET}.{self.number}"

    @property
    def namespace(self) -> str:
        return f"{self.network.name}-{self.name}"

    def start(self) -> None:
        """Power on: sshd answers when it returns. What was written before is still there, but for /tmp and /run."""
        (self.folder / "upper").mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        for name in ("work", "root"):
            (self.folder / name).mkdir(exist_ok=True)
        command = ["ip", "netns", "exec", self.namespace, "unshare", "--pid", "--fork", "--kill-child", "--mount"]
        command += ["--uts", "--ipc", "--cgroup", "bash", str(HOST_SCRIPT), self.name, str(self.folder), sys.executable]
        if self.network.cgroups is None:
            command.append("")
        else:
            self.cgroup = self.network.cgroups / self.namespace
            self.cgroup.mkdir(exist_ok=True)
            join = f'echo $$ > {self.cgroup}/cgroup.procs && exec "$@"'
            command = ["bash", "-c", join, "bash", *command, str(self.cgroup)]
        with (self.folder / "console").open("ab") as console:
            self.process = subprocess.Popen(
                [*command, *self.network.shown], stdout=console, stderr=console, start_new_session=True
            )
        deadline = time.monotonic() + WAIT_S
        while self.network.ssh(self, "true", check=False).returncode != 0:
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "console").read_text()
            time.sleep(0.1)

    def vanish(self) -> None:
        """Loss of power: every process of it is killed at once, and nothing says goodbye."""
        if self.process is not None:
            self.process.kill()  # unshare kills the first process of the namespaces
            self.process.wait()
            self.process = None
        if self.cgroup is not None:
            deadline = time.monotonic() + WAIT_S
            while "populated 1" in (self.cgroup / "cgroup.events").read_text():
                assert time.monotonic() < deadline, f"processes of {self.name} do not end"
                time.sleep(0.01)
            for folder in sorted(filter(Path.is_dir, self.cgroup.rglob("*")), reverse=True):
                folder.rmdir()
            self.cgroup.rmdir()
            self.cgroup = None

    def make_folders(self, *folders: str) -> None:
        """Makes folders anywhere in it, which belong to its user."""
        into = ("nsenter", f"--target={self._first()}", "--all", "--root", "--wd=/")
        run(*into, "/usr/bin/install", "-d", "-o", USER, "-g", USER, *folders)

    def processes(self) -> dict[int, str]:
        """The command lines of all processes in it but the system's own and logins, by their id outside."""
        first = self._first()
        if first is None:
            return {}
        inside = os.readlink(f"/proc/{first}/ns/pid")
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.readlink(entry / "ns" / "pid") == inside:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line and not line.startswith(SYSTEM):
                        found[int(entry.name)] = line
        return found

    def _first(self) -> int | None:
        if self.process is None:
            return None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0]) if children else None

    def ports(self) -> set[int]:
        """TCP ports on which something listens, but for sshd's."""
        listed = run("ip", "netns", "exec", self.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6").stdout
        rows = [line.split() for line in listed.splitlines()]
        return {int(row[1].rsplit(":", 1)[1], 16) for row in rows if len(row) > 3 and row[3] == "0A"} - {22}

    def files(self) -> set[str]:
        """Paths of all files that it has written or removed, but for the system's own and what lies in /tmp, /run and
        /dev, which are in `volatile`."""
        upper = self.folder / "upper"
        return {str(path.relative_to(upper)) for path in upper.rglob("*") if not path.is_dir()}

    def volatile(self) -> set[str]:
        """Paths of all files in /tmp and /dev/shm, but for those of this machine that are shown there."""
        others = " ".join(f"-path {shlex.quote(folder)} -prune -o" for folder in self.network.shown)
        find = f"find /tmp /dev/shm -mindepth 1 {others} -not -type d -print 2> /dev/null"
        return set(self.network.ssh(self, find, check=False).stdout.split())


@dataclass
class Network:
    """Hosts on one bridge.

    | attribute | meaning |
    | --- | --- |
    | `shown` | folders of this machine in /tmp that hosts see all the same |
    | `cgroups` | of this machine, a part of which is each host's; None: hosts have no systemd |
    """

    name: str
    folder: Path
    shown: Sequence[str] = ()
    cgroups: Path | None = None
    hosts: list[Host] = field(default_factory=list)

    def __post_init__(self) -> None:
        run("ip", "netns", "add", self.name)
        for command in (
            ("link", "set", "lo", "up"),
            ("link", "add", "name", "bridge", "type", "bridge"),
            ("addr", "add", f"{OPERATOR}/24", "dev", "bridge"),
            ("link", "set", "bridge", "up"),
        ):
            run("ip", "-n", self.name, *command)
        self.key = self.folder / "key"
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))

    def add(self, name: str) -> Host:
        """A host, without power yet."""
        host = Host(self, name, 10 + len(self.hosts), self.folder / name)
        host.folder.mkdir()
        shutil.copy(self.key.with_suffix(".pub"), host.folder / "authorized_keys")
        # As on Debian, a machine's own name is a loopback address; others are found without asking a network.
        others = "".join(f"{SUBNET}.{number} host{number}\n" for number in range(10, 30))
        (host.folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}")
        run("ip", "netns", "add", host.namespace)
        self.hosts.append(host)
        pair = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
        run("ip", "-n", self.name, "link", "add", "name", name, *pair)
        run("ip", "-n", self.name, "link", "set", "dev", name, "master", "bridge", "up")
        for command in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{host.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", "default", "via", OPERATOR),
        ):
            run("ip", "-n", host.namespace, *command)
        return host

    def close(self) -> None:
        for host in self.hosts:
            host.vanish()
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` on the operator's machine."""
        return ["ip", "netns", "exec", self.name, *command]

    def enter(self, host: Host | None = None) -> None:
        """Moves the calling thread to the operator's machine, or to a host: the sockets that it opens from now on are
        there."""
        name = self.name if host is None else host.namespace
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns to {name}")

    def ssh(self, host: Host, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A login that runs a command, as an operator's."""
        options = ["-i", str(self.key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
        line = self.command("ssh", *options, "-o", "ConnectTimeout=5", "-o", "LogLevel=ERROR", f"{USER}@{host.address}")
        done = subprocess.run([*line, command], capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done


@contextlib.contextmanager
def network(
    folder: Path, names: Sequence[str], shown: Sequence[str] = (), cgroups: Path | None = None
) -> Iterator[Network]:
    """A network with these hosts, which run. At the end nothing is left of them."""
    made = Network(f"shoal{os.getpid()}", folder, shown, cgroups)
    try:
        added = [made.add(name) for name in names]
        with ThreadPoolExecutor() as threads:
            list(threads.map(Host.start, added))
        yield made
    finally:
        made.close()
