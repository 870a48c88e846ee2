"""The drafter of what grammars force, with a tokenizer whose tokens are bytes, and one that merges them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker.drafts.acceptance_rates import Acceptance
from worker.drafts.canonical import CanonicalTokenizer
from worker.drafts.grammar import GrammarDrafter
from worker.messages import Grammar
from worker.structured_output import GrammarCompiler, GrammarState

END = 257
States = Callable[[str], GrammarState]


@pytest.fixture(scope="module")
def states(tiny_llama: Path) -> Iterator[States]:
    """Makes the state of a regular expression."""
    compiler = GrammarCompiler(tiny_llama, 258, 10.0, (END,))
    yield lambda regex: GrammarState(compiler.submit(Grammar("regex", regex)).result(60))
    compiler.close()


@pytest.fixture
def drafter(tiny_llama: Path) -> GrammarDrafter:
    return GrammarDrafter(CanonicalTokenizer(tiny_llama, 258))


def ids(tiny_llama: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_what_is_forced_and_the_end(drafter: GrammarDrafter, states: States, tiny_llama: Path) -> None:
    state = states("key: [ab]cd")
    drafter.add(3, [], [], [], state)
    assert drafter.propose(3, 9).token_ids == ids(tiny_llama, "key: ")
    assert drafter.propose(3, 2).token_ids == ids(tiny_llama, "ke")
    assert drafter.propose(3, 0).token_ids == []
    for token_id in ids(tiny_llama, "key: "):
        state.accept(token_id)  # proposals have left it as it was
    drafter.extend(3, ids(tiny_llama, "key: "))
    assert drafter.propose(3, 9).token_ids == []  # a or b
    state.accept(*ids(tiny_llama, "a"))
    drafter.extend(3, ids(tiny_llama, "a"))
    assert drafter.propose(3, 9).token_ids == [*ids(tiny_llama, "cd"), END]
    drafter.remove(3)
    assert drafter.propose(3, 9).token_ids == []


def test_a_sequence_without_a_grammar_gets_no_proposal(drafter: GrammarDrafter) -> None:
    drafter.add(0, [1, 2], [3], [4], None)
    drafter.extend(0, [5])
    assert drafter.propose(0, 9).token_ids == []


def test_tokens_are_those_that_the_model_would_write(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*alphabet, "na", "me", "name"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("n", "a"), ("m", "e"), ("na", "me")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    canonical = CanonicalTokenizer(tmp_path, len(vocabulary))
    whole = canonical.encode(b'name"')
    assert whole.token_ids == (vocabulary["name"], vocabulary['"'])
    assert whole.num_certain == 2
    cut = canonical.encode(b'"na')
    assert cut.token_ids == (vocabulary['"'], vocabulary["na"])
    assert cut.num_certain == 1  # `name` may come


def test_acceptance_follows_what_was_verified() -> None:
    learned = Acceptance([0.5, 0.5])
    learned.add(1)
    learned.add(2)
    assert learned.expected(1, 0) == learned.expected(2, 1) == 0.5
    for _ in range(50):
        learned.observe(1, 0, 4, 4)
    assert learned.expected(1, 0) > 0.95
    assert 0.9 < learned.expected(2, 0) <= learned.expected(1, 0)  # what one sequence taught counts for others
    assert learned.expected(2, 1) == 0.5  # but not for other evidence
    for _ in range(20):
        learned.observe(2, 0, 4, 0)
    assert learned.expected(2, 0) < 0.5 < learned.expected(1, 0)
    learned.remove(2)
    learned.add(2)
    assert learned.expected(2, 0) > 0.5  # another sequence at its key
