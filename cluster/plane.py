"""The secret of the sockets between routers and replicas (`worker.curve`), which Ray hands on to all processes.

It is kept in the table of Ray's head, made by who asks first, and stays as long as the cluster. As an argument of a
deployment it would be in what Serve publishes, and a new one would replace all replicas. All code that runs on the
cluster can read it, and where Ray asks for a token, nothing else.
"""

import os

from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from worker.curve import SECRET_BYTES

_KEY, _NAMESPACE = b"plane", b"shoal"


def cluster_secret(proposed: bytes | None = None) -> bytes:
    """The secret of the cluster that this process is part of. `proposed`: what it becomes if there is none yet; a new
    one by itself."""
    _internal_kv_put(_KEY, proposed or os.urandom(SECRET_BYTES), overwrite=False, namespace=_NAMESPACE)
    secret = _internal_kv_get(_KEY, namespace=_NAMESPACE)
    if secret is None:
        raise RuntimeError("Ray does not keep the secret of this cluster's sockets")
    return bytes(secret)
