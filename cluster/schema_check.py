"""Verdict on a JSON schema for structured output, without a server."""

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
    | `engine` | the library that follows its grammar |
    | `cpu_s`, `size_bytes` | CPU time to compile it, and memory of the grammar |
    """

    refusal: str | None = None
    engine: str = ""
    cpu_s: float = 0.0
    size_bytes: int = 0


def check(text: str, model: str, timeout_s: float) -> SchemaVerdict:
    """The verdict on a schema in JSON, for the tokens of `model`, a known name or a folder. Compiling may take
    `timeout_s` of CPU time. Raises ModelError, and CompilerUnavailable (a RuntimeError) if the machine cannot compile.
    """
    model_dir = resolve(model, weights=False)
    config = read_config(model_dir)
    ends = eos_token_ids(model_dir, config.eos_token_id)
    compiler = GrammarCompiler(model_dir, config.vocab_size, timeout_s, ends)
    try:
        compiled = compiler.submit(Grammar("json_schema", text)).result()
    except GrammarError as error:
        return SchemaVerdict(str(error))
    finally:
        compiler.close()
    return SchemaVerdict(None, compiled.engine, compiled.cpu_s, compiled.size_bytes)
