"""Where Ray listens: it takes all interfaces by itself, whatever the address of the machine that it is told."""

import os
from typing import Any

import ray
from ray._common.tls_utils import add_port_to_grpc_server
from ray._private import ray_constants


def keep_ray_here() -> None:
    """The Ray that this process starts next listens on the loopback interface, with all of its ports."""
    # Ray does so on systems where it makes no clusters. Its constant has been read already; its processes read the
    # variable.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def keep_serve_here() -> None:
    """The port on which Serve takes calls for the deployment in this process, which nothing of Shoal uses, is on the
    address that Ray has for this machine. To be called in the deployment's `__init__`: Serve listens after it."""
    from ray.serve._private import replica  # it takes a second

    def add(server: Any, address: str) -> int:
        port = address.rpartition(":")[2]
        own = ray.util.get_node_ip_address()
        return int(add_port_to_grpc_server(server, f"[{own}]:{port}" if ":" in own else f"{own}:{port}"))

    replica.add_port_to_grpc_server = add
