"""Verdict on a JSON schema for structured output, without a server."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.models import resolve
from worker.messages import Grammar
from worker.models.config import eos_token_ids, read_config
from worker.structured_output import GrammarCompiler, GrammarError


@dataclass(frozen=True)
class SchemaVerdict:
    """Whether a schema is enforced, and by what means.

    | field | meaning |
    | --- | --- |
    | `refusal` | why it is refused; None if every finished answer satisfies it |
    | `engine` | the library that follows its grammar; empty if it is refused with `strict` false too |
    | `cpu_s`, `size_bytes` | CPU time to compile it, and memory of the grammar |
    | `not_enforced` | keywords, with their places, that are left out with `strict` false |
    | `narrowed` | keywords, with their places, of which not all values can be written |

    The last five are of the grammar with `strict` false if the schema is refused otherwise.
    """

    refusal: str | None = None
    engine: str = ""
    cpu_s: float = 0.0
    size_bytes: int = 0
    not_enforced: Sequence[str] = ()
    narrowed: Sequence[str] = ()


def check(text: str, model: str, timeout_s: float) -> SchemaVerdict:
    """The verdict on a schema in JSON, for the tokens of `model`, a known name or a folder. Compiling may take
    `timeout_s` of CPU time. Raises ModelError, and CompilerUnavailable (a RuntimeError) if the machine cannot compile.
    """
    model_dir = resolve(model, weights=False)
    config = read_config(model_dir)
    ends = eos_token_ids(model_dir, config.eos_token_id)
    compiler = GrammarCompiler(model_dir, config.vocab_size, timeout_s, ends)
    refusal: str | None = None
    try:
        for strict in (True, False):
            try:
                made = compiler.submit(Grammar("json_schema", text, strict=strict)).result()
                lists = made.not_enforced, made.narrowed
                return SchemaVerdict(refusal, made.engine, made.cpu_s, made.size_bytes, *lists)
            except GrammarError as error:
                refusal = refusal or str(error)
    finally:
        compiler.close()
    return SchemaVerdict(refusal)
