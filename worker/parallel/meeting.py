"""Where the ranks of a replica meet: apart from their store, since who passes it on need not have PyTorch."""

import msgspec


class Meeting(msgspec.Struct, frozen=True):
    """Where ranks meet, and the secret that admits them. `address`: as ZeroMQ takes it."""

    address: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Meeting({self.address!r})"
