"""The routes of the live page: `/` and `/state`."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Response

from router import openapi
from router.models import Models
from router.page.state import server_state
from router.wire.server_state import ServerState

PAGE = Path(__file__).with_name("page.html")


def page_routes(models: Models, version: str, needs_key: bool, inside: list[Any]) -> APIRouter:
    """The routes. The page tells nothing, and needs no API key. Its state tells what `/metrics` does, and depends on
    the same, `inside`. The chat box asks for a key if `needs_key`."""
    return _PageRoutes(models, version, needs_key, inside).routes()


class _PageRoutes:
    """The handlers of requests."""

    def __init__(self, models: Models, version: str, needs_key: bool, inside: list[Any]) -> None:
        self._models, self._version, self._needs_key, self._inside = models, version, needs_key, inside
        self._page = PAGE.read_bytes()
        self._headers = {
            "Content-Security-Policy": security_policy(self._page.decode()),
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
        }

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["operation"])
        routes.get("/", include_in_schema=False)(self.page)
        answers = openapi.answers(ServerState, *([401] if self._inside else []))
        routes.get("/state", dependencies=self._inside, responses=answers)(self.state)
        return routes

    async def page(self) -> Response:
        """The live page."""
        return Response(self._page, headers=self._headers, media_type="text/html; charset=utf-8")

    async def state(self) -> Response:
        """The state of the server, for the page at `/`."""
        found = await server_state(self._models, self._version, self._needs_key)
        headers = {"Cache-Control": "no-store"}
        return Response(msgspec.json.encode(found), headers=headers, media_type="application/json")


def security_policy(page: str) -> str:
    """The Content-Security-Policy of a page: its own style and script run, by their digests, and nothing else; it may
    talk to its own server, and to no other."""
    allowed = [f"{tag}-src {_digests(page, tag)}" for tag in ("script", "style")]
    rest = "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return "; ".join(["default-src 'none'", *allowed, rest])


def _digests(page: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in found]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
