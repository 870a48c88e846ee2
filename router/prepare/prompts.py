"""Prompts as tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from router.prepare.program_calls import ContinuedBranch
from router.prepare.sampling import check_token_ids
from router.programs import BranchText
from router.text.tokenizer import PromptTooLong, Tokenizer
from router.text.truncation import Truncation
from router.wire.errors import ApiError, invalid

# The text is cut in two at a place between two words, so far before its end that what follows cannot change it. Texts
# this long on both sides of the place are looked at.
AROUND_CHARS = 64
MIN_CUT_CHARS = 512  # characters; shorter texts are tokenised with what follows them

_BEGINS = BranchText()  # what a prompt follows: nothing


@dataclass(frozen=True)
class Prompt:
    """A prompt. `text` is what was sent: `echo` repeats it, a branch keeps it; None for a prompt sent as tokens."""

    token_ids: list[int]
    text: str | None = None


def separate_prompts(prompt: str | list[str | int | list[int]], param: str = "prompt") -> list[str | list[int]]:
    """The prompts of a request as a list: each a text, or token ids. Raises ApiError about `param`."""
    if isinstance(prompt, str):
        return [prompt]
    texts = [entry for entry in prompt if isinstance(entry, str)]
    token_ids = [entry for entry in prompt if isinstance(entry, int)]
    lists = [entry for entry in prompt if isinstance(entry, list)]
    if len(token_ids) == len(prompt):
        return [token_ids]
    if len(texts) == len(prompt):
        return list(texts)
    if len(lists) == len(prompt):
        return list(lists)
    raise invalid(f"{param!r} mixes texts, token ids and lists: a list must be all of one kind.", param)


def branch_prompts(
    common: str, branches: Sequence[ContinuedBranch], tokenizer: Tokenizer, context_length: int
) -> list[Prompt]:
    """The prompts of branches whose texts begin with `common`. Several branches continue the same one."""
    if len(branches) == 1:
        (only,) = branches
        return [Prompt(encode_prompt(only.text, tokenizer, context_length, only.held.branch), only.text)]
    branch = branches[0].held.branch
    held = branch.token_ids.tolist()

    def encode(text: str, begins: bool) -> list[int]:
        return tokenizer.encode_part(text, begins and not held, context_length) if text or not held else []

    own = [entry.text[len(common) :] for entry in branches]
    try:
        prompts = _forked(branch.tail + common, own, encode)
    except PromptTooLong as error:
        raise too_long(error.tokens, context_length, "prompt", "at least ") from None
    if not all(held or token_ids for token_ids in prompts):
        raise _empty("prompt")
    return [Prompt(held + token_ids, entry.text) for token_ids, entry in zip(prompts, branches, strict=True)]


def tokenized_prompt(
    entry: str | list[int],
    tokenizer: Tokenizer,
    context_length: int,
    truncation: Truncation | None = None,
    room: int = 0,
    param: str = "prompt",
) -> Prompt:
    """The prompt as it was sent, cut as `truncation` allows to `room` tokens. Raises ApiError about `param`."""
    if isinstance(entry, list):
        check_token_ids(entry, tokenizer.vocab_size, param)
        return Prompt(entry if truncation is None else truncation.cut(entry, room))
    if truncation is None:
        return Prompt(encode_prompt(entry, tokenizer, context_length, _BEGINS, param), entry)
    if not (token_ids := truncation.tokens(entry, tokenizer, room)):
        raise _empty(param)
    return Prompt(token_ids)  # it is no longer what was sent


def encode_prompt(
    text: str, tokenizer: Tokenizer, context_length: int, branch: BranchText, param: str = "prompt"
) -> list[int]:
    """The tokens of a branch with `text` after it. Raises ApiError if they are too many, or none."""
    try:
        token_ids = branch.prompt(text, partial(tokenizer.encode_part, context_length=context_length))
    except PromptTooLong as error:
        raise too_long(error.tokens, context_length, param, "at least ") from None
    if not token_ids:
        raise _empty(param)
    return token_ids


def encode_inside(text: str, tokenizer: Tokenizer, context_length: int, param: str) -> list[int]:
    """The tokens of a text inside a prompt. Raises ApiError if they are too many."""
    try:
        return tokenizer.encode_continuation(text, context_length)
    except PromptTooLong as error:
        raise too_long(error.tokens, context_length, param, "at least ") from None


def context_room(token_ids: list[int], context_length: int, param: str) -> int:
    """The number of tokens that fit into the context after the prompt."""
    room = context_length - len(token_ids)
    if room < 1:
        raise too_long(len(token_ids), context_length, param)
    return room


def _empty(param: str) -> ApiError:
    return invalid(f"{param!r} is empty: this model needs at least one token to begin with.", param)


def too_long(tokens: int, context_length: int, param: str, about: str = "") -> ApiError:
    """The error for a prompt that the context has no room for. Agents shorten the conversation by themselves when they
    recognise it: Codex by the code, Claude Code by the first sentence (`TOKENS tokens > MOST`), most others by either
    sentence."""
    return invalid(
        f"prompt is too long: {about}{tokens} tokens > {context_length} maximum. This model's maximum context length "
        f"is {context_length} tokens, for prompt and answer together.",
        param,
        "context_length_exceeded",
    )


def _forked(common: str, texts: Sequence[str], encode: Callable[[str, bool], list[int]]) -> list[list[int]]:
    """The tokens of `common` with each of `texts` after it. `encode` takes a text and whether it begins the prompt."""
    cut = _cut(common, encode) if len(texts) > 1 else 0
    if cut == 0:
        return [encode(common + text, True) for text in texts]
    beginning = encode(common[:cut], True)
    return [beginning + encode(common[cut:] + text, False) for text in texts]


def _cut(text: str, encode: Callable[[str, bool], list[int]]) -> int:
    """A place at which the text may be cut without a change of its tokens: before a space between two words. 0 if there
    is none."""
    if len(text) < MIN_CUT_CHARS:
        return 0
    at = len(text) - AROUND_CHARS
    while (at := text.rfind(" ", AROUND_CHARS, at)) > 0:
        if text[at - 1].isalpha() and text[at + 1].isalpha():
            before, after = text[at - AROUND_CHARS : at], text[at : at + AROUND_CHARS]
            return at if encode(before, False) + encode(after, False) == encode(before + after, False) else 0
    return 0
