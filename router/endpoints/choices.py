"""Log probabilities of given choices after a prompt: `POST /v1/choices`.

Each choice is a sequence of its own, the prompt and the choice, that generates nothing. Where tokens of prompt and
choice merge, scores begin with the merged token.
"""

import uuid
from dataclasses import dataclass

import msgspec

from router.generation import WholeFormat
from router.prepare.prepared_request import Choice, PreparedRequest
from router.prepare.prompts import Prompt, context_room, encode_prompt
from router.programs import BranchCall, BranchText
from router.text.output_text import Piece, TokenText
from router.text.tokenizer import Tokenizer
from router.wire.errors import invalid
from router.wire.requests import ChoicesRequest
from router.wire.responses import ScoredChoice, ScoredChoices, Usage, finite
from worker.messages import SamplingParams, TokenLogprobs


@dataclass(frozen=True)
class PreparedChoices:
    """A request for scores, ready to run.

    | field | meaning |
    | --- | --- |
    | `request` | the sequences: one for each choice, then one for each scored without the prompt |
    | `num_choices` | number of choices |
    | `unconditional` | for each sequence without the prompt, the number of its choice; None if none was asked for |
    """

    request: PreparedRequest
    num_choices: int
    unconditional: list[int] | None


def prepare_choices(
    request: ChoicesRequest,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    arrived: float,
    call: BranchCall | None,
    branch: BranchText,
) -> PreparedChoices:
    """Prepares a request for scores: tokenises the prompt, which follows `branch` of the program in `call`, and the
    choices. Slow: run it in a thread. Raises ApiError."""
    asked = len(request.choices) * (2 if request.unconditional else 1)
    if asked > max_sequences:
        raise invalid(f"The choices need {asked} sequences; the limit is {max_sequences} in one request.", "choices")
    prompt_ids = encode_prompt(request.prompt, tokenizer, context_length, branch)
    sequences: list[Choice] = []
    scored: list[list[int]] = []  # the scored tokens of each sequence

    def add(token_ids: list[int], start: int, call: BranchCall | None) -> None:
        context_room(token_ids, context_length, "choices")
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, prompt_logprobs=1, prompt_logprobs_start=start
        )
        sequences.append(Choice(len(sequences), Prompt(token_ids), sampling, not sequences, call))
        scored.append(token_ids[start:])

    for choice in request.choices:
        add(*_with_choice(request.prompt, prompt_ids, choice, tokenizer, context_length, branch), call)
    unconditional: list[int] | None = [] if request.unconditional else None
    if unconditional is not None:
        beginning = tokenizer.encode("")
        for number, token_ids in enumerate(scored[:]):
            if beginning or len(token_ids) > 1:  # a first token that follows nothing has no probability
                add(beginning + token_ids, len(beginning) or 1, None)
                unconditional.append(number)
    prepared = PreparedRequest(
        id="choices-" + uuid.uuid4().hex,
        sequences=sequences,
        prompt_tokens=len(prompt_ids) + sum(map(len, scored)),
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
        priority=0,
        include_usage=False,
        usage_so_far=False,
        names_tier=False,
        prompt_param="prompt",
        grammar_param=None,
        discard=True,
        together=True,
        arrived=arrived,
    )
    return PreparedChoices(prepared, len(request.choices), unconditional)


def _with_choice(
    text: str, prompt_ids: list[int], choice: str, tokenizer: Tokenizer, context_length: int, branch: BranchText
) -> tuple[list[int], int]:
    """The tokens of the prompt with a choice, and the position of the first that is scored: the first at which they
    differ from the prompt's."""
    token_ids = encode_prompt(text + choice, tokenizer, context_length, branch)
    pairs = zip(prompt_ids, token_ids, strict=False)
    start = next((number for number, (old, new) in enumerate(pairs) if old != new), len(prompt_ids))
    if 0 < start < len(token_ids):
        return token_ids, start
    # The choice merges with the very first token, which has no probability: prompt and choice are kept apart.
    return prompt_ids + tokenizer.encode_continuation(choice, context_length), len(prompt_ids)


class ChoicesFormat(WholeFormat):
    """Writes scores as one JSON object. There is no stream."""

    continues = True

    def __init__(self, prepared: PreparedChoices, model: str) -> None:
        self._prepared = prepared
        self._model = model

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        """The scores of all choices. `answers`, by sequence, have its scored tokens."""
        prepared = self._prepared
        scores = [_scores(answer.tokens) for answer in answers]
        alone: dict[int, list[TokenLogprobs]] = {}
        if prepared.unconditional is not None:
            alone = dict(zip(prepared.unconditional, scores[prepared.num_choices :], strict=True))
        choices = []
        for number, tokens in enumerate(scores[: prepared.num_choices]):
            unconditional: list[float | None] | None = None
            if prepared.unconditional is not None:
                known = [finite(token.logprob) for token in alone.get(number, [])]
                unconditional = [*[None] * (len(tokens) - len(known)), *known]
            choices.append(
                ScoredChoice(
                    tokens=[token.token_id for token in tokens],
                    logprobs=[finite(token.logprob) for token in tokens],
                    unconditional_logprobs=unconditional,
                    greedy=[token.logprob >= token.top[0][1] for token in tokens],
                    top_logprob=[finite(token.top[0][1]) for token in tokens],
                )
            )
        request = prepared.request
        return msgspec.json.encode(
            ScoredChoices(id=request.id, created=request.created, model=self._model, choices=choices, usage=usage)
        )


def _scores(tokens: list[TokenText]) -> list[TokenLogprobs]:
    return [token.logprobs for token in tokens if token.logprobs is not None]
