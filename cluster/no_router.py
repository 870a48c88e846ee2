"""The answer to clients of Kubernetes while there is no router: 503, at once.

An HAProxy of Serve's that knows of no router passes requests on to a proxy of Serve's own on the head. The proxy would
hold each request until there is a router. Serve puts `middlewares` in front of it, because the chart names it in the
head's environment.
"""

import asyncio

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.deployed import ROUTER, details
from router.streaming.dialects import error_response
from router.wire.errors import ApiError

OWN = "/-/"  # paths of the proxy's own, which HAProxy asks whether it lives
ANSWERING = ("RUNNING", "UPDATING", "PENDING_MIGRATION")  # states of a replica in Serve


class NoRouter:
    """Middleware that refuses requests while no router runs. Those for the proxy itself pass, and those that HAProxy
    sends because a router is late for its health check."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN) or await asyncio.to_thread(_may_answer):
            await self._app(scope, receive, send)
            return
        error = ApiError(503, "No router of this server runs.", code="no_router", headers={"Retry-After": "5"})
        await error_response(error, scope)(scope, receive, send)


def _may_answer() -> bool:
    """Whether a router runs, as far as Serve can tell."""
    try:
        replicas = details()["deployments"][ROUTER]["replicas"]
    except (KeyError, RayError, RayServeException):
        return True
    return any(replica["state"] in ANSWERING for replica in replicas)


def middlewares() -> list[Middleware]:
    return [Middleware(NoRouter)]
