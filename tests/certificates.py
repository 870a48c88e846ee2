"""Certificates that a test makes."""

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


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
