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
    routes = APIRouter(tags=["operation"])
    content = PAGE.read_bytes()
    headers = {
        "Content-Security-Policy": security_policy(content.decode()),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        """The live page."""
        return Response(content, headers=headers, media_type="text/html; charset=utf-8")

    @routes.get("/state", dependencies=inside, responses=openapi.answers(ServerState, *([401] if inside else [])))
    async def state() -> Response:
        """The state of the server, for the page at `/`."""
        found = await server_state(models, version, needs_key)
        headers = {"Cache-Control": "no-store"}
        return Response(msgspec.json.encode(found), headers=headers, media_type="application/json")

    return routes


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
