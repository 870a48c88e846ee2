"""What a server tells without a key, and TLS."""

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from router.config import RouterConfig
from router.http import listener as listeners
from router.http.listener import Listener

WAIT_S = 10.0
KEYLESS = {"/", "/health", "/ping", "/ready", "/version", "/health_generate"}
DOCUMENTATION = {"/openapi.json", "/docs", "/redoc"}
TELLS = {"/metrics", "/state", *DOCUMENTATION}


# ---------------------------------------------------------------- without a key


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_is_told_without_a_key(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], is_closed: bool
) -> None:
    config = RouterConfig(api_key="sesame", require_auth_for_metrics_endpoint=is_closed)
    stack = make_stack(make_replica(), config=config)
    documented = stack.server.config.app.openapi()["paths"]
    paths = {path for path, ways in documented.items() if "get" in ways and "{" not in path} | {"/"} | TELLS
    told = {path for path in paths if httpx.get(stack.url + path).status_code != 401}
    assert told == (KEYLESS if is_closed else KEYLESS | TELLS)
    key = {"Authorization": "Bearer sesame"}
    for path in TELLS:
        assert httpx.get(stack.url + path, headers=key).status_code == 200
        assert httpx.head(stack.url + path).status_code == (401 if is_closed else 200)
    page = httpx.get(f"{stack.url}/openapi.json", headers=key).json()
    assert page["paths"] == documented and not DOCUMENTATION & documented.keys()
    assert ("401" in documented["/state"]["get"]["responses"]) == is_closed


@pytest.mark.parametrize(
    "settings",
    [
        {"require_auth_for_metrics_endpoint": True},
        {"ssl_certfile": "cert.pem"},
        {"ssl_keyfile": "key.pem"},
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        RouterConfig(**settings)


# ---------------------------------------------------------------- TLS


class Issued:
    """Certificates for 127.0.0.1, each its own authority, in the files that a server reads."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        self.limits = {"ssl_certfile": self.certificate, "ssl_keyfile": self.key}

    def issue(self, key: Any) -> ssl.SSLContext:
        """Replaces the files. Returns what a client needs who trusts the new certificate alone."""
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal")])
        now = datetime.now(UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        pem = made.public_bytes(serialization.Encoding.PEM)
        form = serialization.PrivateFormat.TraditionalOpenSSL
        secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        self.certificate.write_bytes(pem)
        self.key.write_bytes(secret)
        return ssl.create_default_context(cadata=pem.decode())


def elliptic() -> Any:
    return ec.generate_private_key(ec.SECP256R1())


@pytest.fixture
def issued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issued:
    monkeypatch.setattr(listeners, "HANDSHAKE_S", 0)
    return Issued(tmp_path)


class Events:
    """An application that sends an event, and another one when `release` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/events":
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            await self.release.wait()
        await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@asynccontextmanager
async def running(issued: Issued, **limits: Any) -> AsyncIterator[tuple[Events, Listener]]:
    app = Events()
    listener = Listener(app, "127.0.0.1", 0, RouterConfig(**issued.limits, **limits))
    await listener.start()
    try:
        async with asyncio.timeout(WAIT_S):
            yield app, listener
    finally:
        app.release.set()
        await listener.close()


async def asked(listener: Listener, trusted: ssl.SSLContext, path: str = "/") -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection(*listener.address, ssl=trusted)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return reader, writer


@pytest.mark.parametrize("loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_certificate_is_replaced_while_connections_go_on(loop: Callable[[Any], Any], issued: Issued) -> None:
    """By one of another kind, too, and also where a client names no server, as by an address."""
    old = issued.issue(elliptic())

    async def run() -> None:
        async with running(issued) as (app, listener):
            certificate = listener._certificate
            assert certificate is not None
            stream, writer = await asked(listener, old, "/events")
            await stream.readuntil(b"first")
            for key in (rsa.generate_private_key(65537, 2048), elliptic()):
                new = issued.issue(key)
                certificate.look()
                reader, other = await asked(listener, new)
                assert (await reader.readuntil(b"https")).startswith(b"HTTP/1.1 200")
                other.close()
                with pytest.raises(ssl.SSLCertVerificationError):
                    await asked(listener, old)
            app.release.set()
            await stream.readuntil(b"https")
            writer.close()

    loop(run())


@pytest.mark.parametrize("wrong", ["certificate", "key", "missing"])
def test_wrong_files_change_nothing(wrong: str, issued: Issued, caplog: pytest.LogCaptureFixture) -> None:
    trusted = issued.issue(elliptic())
    kept = issued.certificate.read_bytes(), issued.key.read_bytes()

    async def run() -> None:
        async with running(issued) as (_, listener):
            certificate = listener._certificate
            assert certificate is not None
            issued.issue(elliptic())
            if wrong == "certificate":  # of two files, the first is replaced
                issued.key.write_bytes(kept[1])
            elif wrong == "key":
                issued.certificate.write_bytes(kept[0])
            else:
                issued.key.unlink()
            for _ in range(2):
                certificate.look()
            reader, writer = await asked(listener, trusted)
            await reader.readuntil(b"https")
            writer.close()
            new = issued.issue(elliptic())
            certificate.look()
            reader, writer = await asked(listener, new)
            await reader.readuntil(b"https")
            writer.close()

    uvloop.run(run())
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert "PRIVATE" not in caplog.text


def test_a_server_without_its_certificate_does_not_start(issued: Issued) -> None:
    with pytest.raises(FileNotFoundError):
        Listener(Events(), "127.0.0.1", 0, RouterConfig(**issued.limits))
    issued.issue(elliptic())
    issued.key.write_bytes(
        elliptic().private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),  # nobody is asked for it
        )
    )
    with pytest.raises(ssl.SSLError):
        Listener(Events(), "127.0.0.1", 0, RouterConfig(**issued.limits))


def test_who_does_not_speak_tls_is_shown_out(issued: Issued) -> None:
    trusted = issued.issue(elliptic())

    async def run() -> None:
        async with running(issued, header_timeout_s=0.05) as (_, listener):
            for said in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"", b"\x16\x03\x01\x02\x00"):
                reader, writer = await asyncio.open_connection(*listener.address)
                writer.write(said)
                with suppress(ConnectionResetError):
                    assert b"HTTP" not in await reader.read()
                writer.close()
        async with running(issued, keep_alive_s=0.05) as (_, listener):
            reader, writer = await asked(listener, trusted)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")  # and then closed, as it is idle
            reader, writer = await asyncio.open_connection(*listener.address, ssl=trusted)
            writer.write(b"nonsense\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()

    uvloop.run(run())
