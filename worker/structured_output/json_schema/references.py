"""Resolution of a JSON schema's references."""

import re
from typing import Any
from urllib.parse import unquote

from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema import drafts
from worker.structured_output.json_schema.modern import anchors


class SchemaReferences:
    """The places that the references of one schema lead to, all in the schema itself."""

    def __init__(self, root: Any) -> None:
        """`root`: the whole schema, in the words of 2020-12."""
        self._root = root
        self._anchors = anchors(root)

    def resolve(self, ref: str, at: str, key: str = "$ref") -> tuple[Any, str]:
        """The schema that a reference points to, and its place. `$dynamicRef` is the same as `$ref`, since a schema has
        no other schema in it. Raises GrammarError if the reference, which stands at `at`, leads nowhere."""
        own = self._root.get("$id") if isinstance(self._root, dict) else None
        if isinstance(own, str) and own.split("#")[0] and ref.split("#")[0] == own.split("#")[0]:
            ref = "#" + ref.partition("#")[2]
        if ref == "#":
            return self._root, "#"
        if re.match("#[^/]", ref):
            if ref[1:] in self._anchors:
                return self._anchors[ref[1:]], ref
            raise GrammarError(f"{key} at {at}: {drafts.named(ref)}")
        if not ref.startswith("#/"):
            raise GrammarError(
                f"{key} at {at}: only references into the schema itself (#/...) are supported, not {ref!r}"
            )
        target = self._root
        for part in unquote(ref[2:]).split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                target = target[int(name)] if isinstance(target, list) else target[name]
            except (KeyError, IndexError, ValueError, TypeError):
                raise GrammarError(f"{key} at {at}: there is no {ref!r} in the schema") from None
        if not isinstance(target, bool | dict):
            raise GrammarError(f"{key} at {at}: {ref!r} is not a schema")
        return target, ref
