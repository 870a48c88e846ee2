"""Text, log probabilities and reasons to stop of one sequence."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.output_text import OutputText, Piece
from router.text.tokenizer import Tokenizer
from tests.router.outputs import outputs
from worker.messages import Output, TokenLogprobs


def run(transcript: OutputText, messages: list[Output]) -> list[Piece]:
    pieces = []
    for output in messages:
        pieces.append(transcript.push(output))
        if pieces[-1].finish_reason is not None:
            break
    return pieces


def text_of(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


@settings(deadline=None, max_examples=150)
@given(
    text=st.text("abc de🦊é", max_size=25),
    stops=st.lists(st.text("abc de🦊é", min_size=1, max_size=4), max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 60), max_size=10),
)
def test_neither_text_nor_tokens_depend_on_the_cuts(
    tokenizer: Tokenizer, text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    ids = tokenizer.encode(text)
    one = OutputText(tokenizer, stop=stops, wants_logprobs=True)
    whole = run(one, outputs(ids, list(range(len(ids)))))
    other = OutputText(tokenizer, stop=stops, wants_logprobs=True)
    cut = run(other, outputs(ids, cuts))
    assert text_of(whole) == text_of(cut)
    assert [t for piece in whole for t in piece.tokens] == [t for piece in cut for t in piece.tokens]
    assert one.num_tokens == other.num_tokens
    assert whole[-1].finish_reason == cut[-1].finish_reason == ("stop" if text_of(cut) != text else "length")
    assert not any(stop in text_of(cut) for stop in stops)


def test_a_stop_string_takes_its_tokens_with_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there, general!")
    transcript = OutputText(tokenizer, stop=("re, g",), wants_logprobs=True)
    pieces = run(transcript, outputs(ids, list(range(len(ids)))))
    assert text_of(pieces) == "Hello the"
    assert pieces[-1].finish_reason == "stop"
    offsets = [token.offset for piece in pieces for token in piece.tokens]
    assert offsets and offsets == sorted(offsets) and offsets[-1] < len("Hello the")
    assert transcript.num_tokens <= len(ids)


def test_log_probabilities_wait_for_their_text(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id(token) for token in ("a", "b", "c", "d")]
    transcript = OutputText(tokenizer, stop=("bcx",), wants_logprobs=True)
    pieces = run(transcript, outputs(ids, [1, 2, 3]))
    assert [piece.text for piece in pieces] == ["a", "", "", "bcd"]
    assert [[token.token_id for token in piece.tokens] for piece in pieces] == [ids[:1], [], [], ids[1:]]
    assert [token.offset for piece in pieces for token in piece.tokens] == [0, 1, 2, 3]


def test_tokens_without_text_are_told_at_the_latest_at_the_end(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id(token) for token in ("ð", "Ł", "<|im_end|>")]
    (piece,) = run(
        OutputText(tokenizer, wants_logprobs=True), outputs(ids, [], finish_reason="stop", stop_token_id=ids[-1])
    )
    assert piece.text == "\ufffd"
    assert [token.token_id for token in piece.tokens] == ids


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_token_is_not_text(tokenizer: Tokenizer, skip: bool) -> None:
    for token in ("<|im_end|>", "Hello"):
        ids = [tokenizer.token_id("a"), tokenizer.token_id(token)]
        transcript = OutputText(tokenizer, skip_special_tokens=skip)
        (piece,) = run(transcript, outputs(ids, [], finish_reason="stop", stop_token_id=ids[1]))
        assert (piece.text, piece.finish_reason, transcript.num_tokens) == ("a", "stop", 2)


def test_stop_strings_count_after_min_tokens(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id(token) for token in "abcabc"]
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "abca"), (5, "abcabc")):
        pieces = run(OutputText(tokenizer, stop=("bc",), min_tokens=min_tokens), outputs(ids, [2, 3]))
        assert text_of(pieces) == text


def test_a_stop_string_in_the_last_token_counts(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id(token) for token in "abc"]
    pieces = run(OutputText(tokenizer, stop=("c",)), outputs(ids, []))
    assert (text_of(pieces), pieces[-1].finish_reason) == ("ab", "stop")


def test_held_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = [tokenizer.token_id(token) for token in "abc"]
    pieces = run(OutputText(tokenizer, stop=("abcd",)), outputs(ids, [1, 2]))
    assert [piece.text for piece in pieces] == ["", "", "abc"]
    assert pieces[-1].finish_reason == "length"


def test_echo(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello there")
    transcript = OutputText(tokenizer, wants_logprobs=True)
    logprobs = [None, *(TokenLogprobs(token_id, -1.0) for token_id in ids[1:])]
    prompt = transcript.echo(ids, None, logprobs)
    assert prompt.text == "Hello there"
    assert [token.token_id for token in prompt.tokens] == ids
    assert prompt.tokens[0].logprobs is None and prompt.tokens[0].offset == 0
    (piece,) = run(transcript, outputs([tokenizer.token_id("a")], []))
    assert piece.tokens[0].offset == len("Hello there")


def test_echo_of_half_a_character(tokenizer: Tokenizer) -> None:
    """A prompt of token ids may end in the middle of one; the output completes it."""
    fox = [tokenizer.token_id(token) for token in "ðŁ¦Ĭ"]
    transcript = OutputText(tokenizer)
    assert transcript.echo(fox[:2], None, None).text == ""
    assert text_of(run(transcript, outputs(fox[2:], []))) == "🦊"


@given(st.lists(st.integers(0, 400), max_size=20))
def test_outputs_that_nothing_is_searched_in_make_the_same_text(tokenizer: Tokenizer, token_ids: list[int]) -> None:
    """One token at a time they take a shorter way, which is not open to those whose ends are wanted."""
    plain, watched = OutputText(tokenizer), OutputText(tokenizer, wants_ends=True)
    for output in outputs(token_ids, list(range(len(token_ids)))):
        ours, wanted = plain.push(output), watched.push(output)
        assert (ours.text, ours.token_ids, ours.finish_reason) == (wanted.text, wanted.token_ids, wanted.finish_reason)
        assert plain.num_tokens == watched.num_tokens
