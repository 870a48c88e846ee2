"""Grammars on a thread of their own in a whole replica, with overlapped steps on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.worker.drafts.test_exact import EACH, PROMPTS, said
from tests.worker.engines import checked_engines
from worker.config import WorkerConfig
from worker.drafts import Drafter, Proposal, make_jump_forward
from worker.drafts.grammar import forced_bytes
from worker.engine.cost_store import CostStore
from worker.engine.engine import Components, Engine, load_components
from worker.messages import Generate
from worker.sampling.early_masks import EarlyMasks
from worker.sampling.sampler import Sampler
from worker.structured_output import GrammarState


class Asker(Drafter):
    """Asks grammars what they force, and proposes nothing. Notes whether the thread may have been at work."""

    name = "asker"

    def __init__(self) -> None:
        self.sampler: Sampler | None = None
        self.asked, self.at_once = 0, 0
        self._grammars: dict[int, GrammarState | None] = {}

    def add(
        self,
        key: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        prediction_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        self._grammars[key] = grammar

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Nothing: the grammar knows."""

    def propose(self, key: int, most: int) -> Proposal:
        assert self.sampler is not None
        grammar, early = self._grammars[key], self.sampler._early
        if grammar is not None and not grammar.terminated:
            self.asked += 1
            self.at_once += early is not None and early._work is not None
            forced_bytes(grammar.matcher)
        return Proposal([])

    def remove(self, key: int) -> None:
        del self._grammars[key]


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Callable[..., Engine]]:
    """Makes an engine; at the end no page is lost. With `asker`, its grammars run on a thread."""

    def load(model_dir: Path, config: WorkerConfig, asker: Asker | None = None) -> Components:
        parts = load_components(model_dir, config)._replace(costs=CostStore(), drafters=[])
        if asker is None:
            return parts
        executor = parts.executor
        sampler = Sampler(config.max_running, executor.vocab_size, "cpu", executor.last_tokens, early_masks=True)
        asker.sampler = sampler
        inserted = make_jump_forward(model_dir, executor.vocab_size) if config.jump_forward == "insert" else None
        return parts._replace(sampler=sampler, drafters=[asker], jump_forward=inserted)

    with checked_engines(tiny_llama, kv_tokens=4096) as make:
        yield lambda asker=None, **config: make(lambda *given: load(*given, asker), **config)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each step whose grammars the thread had."""
    steps: list[int] = []
    submit = EarlyMasks.submit

    def counted(early: EarlyMasks, work: Callable[[], None]) -> None:
        steps.append(len(steps))
        submit(early, work)

    monkeypatch.setattr(EarlyMasks, "submit", counted)
    return steps


def test_no_output_changes_and_drafters_never_ask_a_grammar_that_the_thread_has(
    engine: Callable[..., Engine], submitted: list[int]
) -> None:
    plain = engine().generate(PROMPTS, EACH)
    asker = Asker()
    assert said(engine(asker, overlap=True).generate(PROMPTS, EACH)) == said(plain)
    assert len(submitted) > 10 and asker.asked > 10
    assert not asker.at_once


def test_an_abort_while_the_thread_has_the_grammars(engine: Callable[..., Engine], submitted: list[int]) -> None:
    """What its slot's next owner says is what it says alone."""
    guided = [i for i, sampling in enumerate(EACH) if sampling.grammar is not None]
    prompts, each = [PROMPTS[i] for i in guided], [EACH[i] for i in guided]
    plain = engine().generate(prompts, each)
    one = engine(Asker(), overlap=True, max_running=1)
    begin = one._steps.begin

    def abort_one(flight: object) -> None:
        begin(flight)  # type: ignore[arg-type]
        one.abort(["aborted"])

    one.add(Generate(request_id="aborted", prompt_ids=prompts[0], sampling=each[0]))
    one._steps.begin = abort_one  # type: ignore[method-assign, assignment]
    for _ in range(1000):
        if not len(one.scheduler):
            break
        if not one.has_work:
            one._grammar_queue.wait()
        one.step()
    assert submitted
    assert said(one.generate(prompts, each)) == said(plain)
