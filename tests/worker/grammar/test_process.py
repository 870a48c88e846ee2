"""What the process that compiles grammars says of those that are none."""

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from worker.grammar import GrammarError
from worker.grammar.process import CompilerProcess


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompilerProcess]:
    folder = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    made = CompilerProcess(folder, len(alphabet) + 1, [len(alphabet)], memory_bytes=1 << 30)
    yield made
    made.close()


@pytest.mark.parametrize("text", ["root ::=", "x", "é", 'root ::= "a" é', "🦊 ::= é"])
def test_a_grammar_that_is_none_is_the_requests_fault(process: CompilerProcess, text: str) -> None:
    with pytest.raises(GrammarError, match=r"^the grammar does not compile: [^\[]"):
        process.compile("ebnf", text, 20)
    assert process.compile("ebnf", 'root ::= "é🦊"', 20)
