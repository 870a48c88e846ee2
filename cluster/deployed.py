"""The application as Ray Serve has it: how many replicas it keeps of each deployment."""

import ray
from ray.serve._private.common import DeploymentID
from ray.serve.context import _get_global_client

APP = "shoal"  # the application's name in Serve


def scale(deployment: str, number: int) -> None:
    """Tells Serve another number of replicas for one of the application's deployments. Those that run, and go on, are
    not touched."""
    client = _get_global_client()
    assert client is not None, "the application runs"
    ray.get(client._controller.update_deployment_replicas.remote(DeploymentID(deployment, APP), number))


def targets() -> dict[str, int]:
    """How many replicas Serve should keep of each deployment. Raises KeyError if the application is not there."""
    client = _get_global_client()
    assert client is not None, "Serve runs"
    deployments = client.get_serve_details()["applications"][APP]["deployments"]
    return {name: deployment["target_num_replicas"] for name, deployment in deployments.items()}
