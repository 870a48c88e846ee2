"""The answer to clients where Serve's HAProxies know of no router: 503, at once.

Such an HAProxy passes requests on to a proxy of Serve's own on the head, which would hold each of them until there is a
router. Serve puts `middlewares` in front of it, because the chart names it in the head's environment.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from router.errors import ApiError
from router.protocols.dialects import error_response

OWN = "/-/"  # paths of the proxy's own, which HAProxy asks whether it lives


class NoRouter:
    """Middleware that answers all requests but those for the proxy itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(OWN):
            await self._app(scope, receive, send)
            return
        error = ApiError(503, "No router of this server runs.", code="no_router", headers={"Retry-After": "5"})
        await error_response(error, scope)(scope, receive, send)


def middlewares() -> list[Middleware]:
    return [Middleware(NoRouter)]
