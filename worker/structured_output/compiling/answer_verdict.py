"""Judgement of a whole answer by its JSON schema, where the schema is more than a grammar enforces."""

import json
import re
from collections.abc import Sequence
from itertools import islice
from json import JSONDecoder
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from jsonschema_specifications import REGISTRY
from referencing.exceptions import Unresolvable

from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema.modern import with_patterns_of_python
from worker.structured_output.tokens import BY_ID

_MAX_ERRORS = 100  # looked at for the first place
_MAX_MESSAGE_CHARS = 300  # of a message
_SPACE = " \t\n\r"


class AnswerToCheck(NamedTuple):
    """An answer and what it is judged by.

    | field | meaning |
    | --- | --- |
    | `schema` | the JSON schema, as text |
    | `token_ids` | the answer's tokens, without the one that ends it |
    | `after`, `begin` | as `messages.Grammar` has them: text before the answer proper |
    | `with_formats` | whether formats are judged too, because the grammar does not |
    """

    schema: str
    token_ids: list[int]
    after: str | None
    begin: str | None
    with_formats: bool


class AnswerVerdict(NamedTuple):
    """The violation in an answer, None if there is none, and the number of tokens before it."""

    violation: str | None
    kept_tokens: int = 0


def answer_verdict(answer: AnswerToCheck, token_bytes: Sequence[bytes]) -> AnswerVerdict:
    """Judges an answer. `token_bytes`: as `GrammarVocabulary.token_bytes` has them. Raises GrammarError if the schema
    cannot be followed."""
    pieces = [token_bytes[token_id].removeprefix(BY_ID) for token_id in answer.token_ids]
    whole = b"".join(pieces)
    skipped = _thinking_bytes(whole, answer.after, answer.begin)
    try:
        text = whole[skipped:].decode()
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return AnswerVerdict(f"the answer is not JSON: {error}"[:_MAX_MESSAGE_CHARS])
    schema = with_patterns_of_python(json.loads(answer.schema))
    draft = validator_for(schema, default=Draft202012Validator)
    # By default, jsonschema would fetch what references of other schemas lead to.
    validator = draft(schema, registry=REGISTRY, format_checker=draft.FORMAT_CHECKER if answer.with_formats else None)
    try:
        errors = list(islice(validator.iter_errors(value), _MAX_ERRORS))
    except (Unresolvable, re.error, RecursionError) as error:
        raise GrammarError(f"the JSON schema cannot be followed: {error}") from None
    if not errors:
        return AnswerVerdict(None)
    places = [(_start(text, each.absolute_path), each) for each in errors]
    start, first = min(places, key=lambda place: place[0])
    cause = best_match([each for at, each in places if at == start]) or first
    where = "/".join(("#", *map(str, cause.absolute_path)))
    before = skipped + len(text[:start].encode())
    kept = end = 0
    for piece in pieces:
        end += len(piece)
        if end > before:
            break
        kept += 1
    return AnswerVerdict(f"at {where}: {cause.message}"[:_MAX_MESSAGE_CHARS], kept)


def _thinking_bytes(whole: bytes, after: str | None, begin: str | None) -> int:
    """Length of the text before the answer proper."""
    if after is None or (begin is not None and not whole.startswith(begin.encode())):
        return 0
    found = whole.find(after.encode())
    return 0 if found < 0 else found + len(after.encode())


def _start(text: str, path: Sequence[Any]) -> int:
    """Where the value at a path begins in the JSON `text`."""
    at = _skip(text, 0, _SPACE)
    for step in path:
        at = _member(text, at, step)
    return at


def _member(text: str, at: int, step: Any) -> int:
    """Where a member, or an item, of the value at `at` begins: the last one of several with the same name, as JSON is
    read."""
    decode = JSONDecoder().raw_decode
    found, count = at, 0
    at = _skip(text, at + 1, _SPACE)
    while text[at] not in "}]":
        name: Any = count
        if isinstance(step, str):
            name, at = decode(text, at)
            at = _skip(text, at, _SPACE + ":")
        if name == step:
            found = at
        _, at = decode(text, at)
        at = _skip(text, at, _SPACE + ",")
        count += 1
    return found


def _skip(text: str, at: int, characters: str) -> int:
    while at < len(text) and text[at] in characters:
        at += 1
    return at
