"""Prompts that begin with the same text are tokenised as if each were alone."""

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prepare.program_calls import ContinuedBranch
from router.prepare.prompts import MIN_CUT_CHARS, branch_prompts
from router.programs import BranchCall, BranchText, Held
from router.text.tokenizer import Tokenizer
from worker.messages import Lease

WORDS = st.lists(st.sampled_from(["hello", "there", " ", "\n", "é", "🦊", "a", "<|im_start|>", "x1"]), max_size=300)


@pytest.fixture(scope="session", params=["byte level", "byte fallback"])
def either_tokenizer(request: Any, byte_level_tokenizer: Any, byte_fallback_tokenizer: Any) -> Tokenizer:
    return Tokenizer(byte_level_tokenizer if request.param == "byte level" else byte_fallback_tokenizer)


@settings(deadline=None, max_examples=40)
@given(words=WORDS, own=st.lists(st.text("hel lo🦊\n", max_size=6), min_size=2, max_size=3), tail=st.booleans())
def test_forks_have_the_tokens_of_their_whole_texts(
    either_tokenizer: Tokenizer, words: list[str], own: list[str], tail: bool
) -> None:
    branch = BranchText(array("i", [5, 6]), "tail ", 9) if tail else BranchText()
    common = "said " + " ".join(words) + " " + "hello there and more " * (MIN_CUT_CHARS // 20)
    branches = [
        ContinuedBranch(BranchCall(Lease("p", str(i))), Held("p", str(i), branch, tail, None), common + text)
        for i, text in enumerate(own)
    ]
    prompts = branch_prompts(common, branches, either_tokenizer, 1 << 20)
    assert [prompt.token_ids for prompt in prompts] == [
        branch.prompt(common + text, either_tokenizer.encode_part) for text in own
    ]
    assert [prompt.text for prompt in prompts] == [common + text for text in own]


def test_what_forks_share_is_tokenised_once(either_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    encode = either_tokenizer.encode_part

    def counted(text: str, begins: bool, context_length: int | None = None) -> list[int]:
        sizes.append(len(text))
        return encode(text, begins, context_length)

    monkeypatch.setattr(either_tokenizer, "encode_part", counted)
    common = "hello there and more " * MIN_CUT_CHARS
    held = Held("p", "b", BranchText(), False, None)
    branches = [ContinuedBranch(BranchCall(Lease("p", "b")), held, common + str(i)) for i in range(8)]
    branch_prompts(common, branches, either_tokenizer, 1 << 20)
    assert sum(sizes) < 1.2 * len(common)
