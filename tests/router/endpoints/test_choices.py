"""Choices: which tokens are scored, and how the answer is written. The scores are a script's; `tests/server` has real
ones."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from router.endpoints.choices import prepare_choices
from router.programs import BranchText
from router.text.tokenizer import Tokenizer
from router.wire.errors import ApiError
from router.wire.requests import ChoicesRequest
from tests.router.conftest import CONTEXT, byte_level_backend
from worker.messages import Failure, TokenLogprobs

TEXT = st.text("hel loé🦊\n", max_size=12)


def job(tokenizer: Tokenizer, prompt: str, choices: list[str], branch: BranchText | None = None, **fields: Any) -> Any:
    request = ChoicesRequest(model="tiny", prompt=prompt, choices=choices, **fields)
    return prepare_choices(request, tokenizer, CONTEXT, 8, 0.0, None, branch or BranchText())


def scored(made: Any) -> list[tuple[list[int], int]]:
    return [(one.prompt.token_ids, one.sampling.prompt_logprobs_start) for one in made.request.sequences]


@settings(deadline=None, max_examples=200)
@given(prompt=TEXT.filter(bool), choices=st.lists(TEXT.filter(bool), min_size=1, max_size=4))
def test_scores_begin_where_the_tokens_differ(tokenizer: Tokenizer, prompt: str, choices: list[str]) -> None:
    before = tokenizer.encode(prompt)
    for choice, (token_ids, start) in zip(choices, scored(job(tokenizer, prompt, choices)), strict=True):
        whole = tokenizer.encode(prompt + choice)
        if whole[0] == before[0]:
            assert token_ids == whole
            assert whole[:start] == before[:start] and whole[start : start + 1] != before[start : start + 1]
        else:  # nothing comes before the first token
            assert (token_ids, start) == (before + tokenizer.encode(choice), len(before))
        assert 0 < start < len(token_ids)


def test_a_choice_that_merges_with_the_prompt(tokenizer: Tokenizer) -> None:
    merged, apart = scored(job(tokenizer, "The qu", ["ick", "x"]))
    assert merged == (tokenizer.encode("The quick"), 1)
    assert apart == (tokenizer.encode("The qux"), len(tokenizer.encode("The qu")))


def test_choices_follow_a_branch(tokenizer: Tokenizer) -> None:
    branch = BranchText().extended("Hello", tokenizer.encode("Hello"), "ab The", [7, 8], "The")
    made = scored(job(tokenizer, " qu", ["ick"], branch))
    assert made == [
        ([*tokenizer.encode("Hello"), 7, 8, *tokenizer.encode("The quick")], len(tokenizer.encode("Hello")) + 3)
    ]


def test_unconditional_scores_without_a_beginning(tokenizer: Tokenizer) -> None:
    """The first token follows nothing: it has no score, and a choice of one token is not asked about."""
    made = job(tokenizer, "Hello", [" there, general", "x"], unconditional=True)
    choice, single, alone = scored(made)
    assert alone == (choice[0][choice[1] :], 1) and len(alone[0]) > 1
    assert len(single[0]) == single[1] + 1
    assert made.unconditional == [0]


def test_unconditional_scores_after_a_beginning() -> None:
    backend = byte_level_backend()
    beginning = backend.token_to_id("<|im_start|>")
    backend.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", beginning)])
    tokenizer = Tokenizer(backend)
    first, second, *alone = scored(job(tokenizer, "Hello", [" there, general", "x"], unconditional=True))
    assert first[0][0] == beginning
    assert alone == [([beginning, *token_ids[start:]], 1) for token_ids, start in (first, second)]


@pytest.mark.parametrize(
    ("prompt", "choices", "param"),
    [
        ("", ["a"], "prompt"),
        ("a", ["a"] * 9, "choices"),
        ("a", ["a " * CONTEXT], "choices"),
        ("a " * CONTEXT, ["a"], "choices"),
    ],
)
def test_refused_jobs(tokenizer: Tokenizer, prompt: str, choices: list[str], param: str) -> None:
    with pytest.raises(ApiError) as error:
        job(tokenizer, prompt, choices)
    assert (error.value.status, error.value.param) == (400, param)


# ---------------------------------------------------------------- over HTTP


def ask(stack: Any, **fields: Any) -> httpx.Response:
    return httpx.post(f"{stack.url}/v1/choices", json={"model": "tiny", "prompt": "Hello"} | fields)


def test_the_answer(stack: Any, tokenizer: Tokenizer) -> None:
    answer = ask(stack, choices=[" there, general", "x"], unconditional=True).json()
    there, x = tokenizer.encode(" there, general"), tokenizer.encode("x")
    assert answer["choices"] == [
        {
            "tokens": there,
            "logprobs": [-0.5] * len(there),
            "unconditional_logprobs": [None, *[-0.5] * (len(there) - 1)],
            "greedy": [True] * len(there),
            "top_logprob": [-0.5] * len(there),
        },
        {"tokens": x, "logprobs": [-0.5], "unconditional_logprobs": [None], "greedy": [True], "top_logprob": [-0.5]},
    ]
    prompt_tokens = len(tokenizer.encode("Hello")) + 2 * len(there)  # the first one alone is not computed
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}
    assert answer["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 3}}
    assert (answer["object"], answer["model"]) == ("choices", "tiny")
    plain = ask(stack, choices=["x"]).json()["choices"][0]
    assert plain["unconditional_logprobs"] is None


def test_a_token_that_is_not_the_likeliest(make_stack: Callable[..., Any], make_replica: Callable[..., Any]) -> None:
    fake = make_replica()
    fake._logprobs = lambda token_id, top: _unlikely(token_id)
    answer = ask(make_stack(fake), choices=["x"]).json()["choices"][0]
    assert (answer["greedy"], answer["top_logprob"], answer["logprobs"]) == ([False], [-0.25], [-9999.0])


def _unlikely(token_id: int) -> Any:
    return TokenLogprobs(token_id, float("-inf"), [(1, -0.25)])


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({}, 400, "choices"),
        ({"choices": []}, 400, "choices"),
        ({"choices": [""]}, 400, "choices[0]"),
        ({"choices": ["a"] * 129}, 400, "choices"),
        ({"choices": ["a"], "prompt": [1]}, 400, "prompt"),
        ({"choices": ["a"], "model": "other"}, 404, "model"),
        ({"choices": ["a"], "stream": True}, 400, "stream"),
        ({"choices": ["a"], "program": {"id": "p", "branch": "b", "continues": True}}, 409, "program"),
    ],
)
def test_refusals(stack: Any, fields: dict[str, Any], status: int, param: str) -> None:
    answer = ask(stack, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_scores_follow_a_branch_and_do_not_change_it(stack: Any, tokenizer: Tokenizer) -> None:
    """The next request sends the prompt and the choice; a branch that was only scored is not there."""

    def complete(prompt: str, **program: Any) -> int:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "program": {"id": "p"} | program}
        return httpx.post(f"{stack.url}/v1/completions", json=body).status_code

    def prompt_ids() -> list[int]:
        ids: list[int] = stack.fakes["r0"].requests()[-1].prompt_ids
        return ids

    next_call = {"id": "p", "branch": "b", "continues": True}
    assert complete("Hello", branch="b") == 200
    start = prompt_ids() + tokenizer.encode("The quick")[:1]
    for _ in range(2):
        assert ask(stack, prompt=" the", choices=["re"], program=next_call).status_code == 200
        assert prompt_ids() == start + tokenizer.encode(" there")
    fork = {"id": "p", "branch": "c", "parent": "b", "continues": True}
    assert ask(stack, prompt=" the", choices=["re"], program=fork).status_code == 200
    assert complete(" c", branch="c", parent="b", continues=True) == 200
    assert complete(" there", branch="b", continues=True) == 200
    assert prompt_ids() == start + tokenizer.encode(" there")
    assert ask(stack, choices=["a"], program={"id": "p", "branch": "d"}).status_code == 200
    assert complete("x", branch="d", continues=True) == 409


def test_errors_name_the_prompt(stack: Any) -> None:
    fake = stack.fakes["r0"]
    wrong = Failure("invalid", "too long for this replica", "prompt")
    fake.fail(wrong)
    answer = ask(stack, prompt="x", choices=["a", "b"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
