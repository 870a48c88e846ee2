"""Drafts of a draft model: the pages that it shares, what it proposes, and that no output changes by it."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file

from bench.replica import dummy_models
from pipeline.shape import BatchShape
from tests.conftest import make_tiny_llama
from tests.worker.drafting import EACH, GREEDY, PROMPTS, TOKENS, Passes, outputs, said
from tests.worker.engines import checked_engines
from tests.worker.fakes import pages_now
from tests.worker.pipelines import pipeline
from worker.config import WorkerConfig
from worker.drafts import SpeculativeDecoding
from worker.drafts.drafter import Proposal
from worker.drafts.model import ModelDrafter
from worker.engine.cost_store import CostStore
from worker.engine.engine import Components, Engine, Finished, load_components
from worker.executor.draft_model import DraftModel
from worker.executor.memory_budget import DraftBytes, token_bytes
from worker.messages import Generate, Output
from worker.models.draft_vocabulary import check_draft_model
from worker.step import PENDING, Plan

pytestmark = pytest.mark.slow

PAGE = 4


# ---------------------------------------------------------------- the drafter, with a model that is a hash


class HashedModel:
    """Its next token is a hash of all tokens before it, which it reads from the pages: a wrong page, position or token
    gives another one."""

    page_size, num_pages, vocab_size, token_budget, context_length = PAGE, 40, 97, 24, 64

    def __init__(self) -> None:
        self.kv = np.full((self.num_pages, PAGE), -1, dtype=np.int64)
        self.tables = np.full((8, 16), -1, dtype=np.int64)
        self.last = np.zeros(8, dtype=np.int64)
        self.num_computed = 0
        self.breaks = False

    @staticmethod
    def next_token(text: Sequence[int]) -> int:
        return hash(tuple(text)) % 97

    def greedy(self, plans: Sequence[Plan]) -> tuple[list[np.ndarray], list[float]]:
        if self.breaks:
            raise RuntimeError("out of order")
        return [np.array(self._run(plan), dtype=np.int64) for plan in plans], [1.0] * len(plans)

    def _run(self, plan: Plan) -> list[int]:
        found = []
        assert plan.num_tokens <= self.token_budget
        for chunk in plan.chunks:
            row = self.tables[chunk.slot]
            if chunk.pages:
                row[chunk.num_kept_pages : chunk.num_kept_pages + len(chunk.pages)] = chunk.pages
            for place, token_id in enumerate(chunk.token_ids, chunk.start):
                value = self.last[chunk.slot] if token_id == PENDING else token_id
                self.kv[row[place // PAGE], place % PAGE] = value
            self.num_computed += len(chunk.token_ids)
            if chunk.num_logits:
                end = chunk.start + len(chunk.token_ids)
                text = [int(self.kv[row[place // PAGE], place % PAGE]) for place in range(end)]
                assert -1 not in text
                self.last[chunk.slot] = self.next_token(text)
                found.append(int(self.last[chunk.slot]))
        return found


class Text:
    """A running sequence."""

    def __init__(self, slot: int, tokens: Sequence[int], pages: Sequence[int]) -> None:
        self.slot, self.tokens, self.held = slot, list(tokens), list(pages)

    token_limit = 64
    num_computed = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    num_known = num_tokens

    @property
    def num_pages(self) -> int:
        return len(self.held)

    def pages(self, start: int, end: int) -> np.ndarray:
        return np.array(self.held[start:end], dtype=np.int32)

    def token_ids(self, start: int, end: int) -> np.ndarray:
        return np.array(self.tokens[start:end], dtype=np.int32)

    def greedy(self, count: int) -> list[int]:
        text = list(self.tokens)
        for _ in range(count):
            text.append(HashedModel.next_token(text))
        return text[len(self.tokens) :]


def test_drafts_are_what_the_model_says_after_the_whole_text() -> None:
    model = HashedModel()
    drafter = ModelDrafter(model, Passes())
    texts = [Text(3, range(9), range(6)), Text(5, [7, 8], range(10, 12)), Text(1, range(50, 61), range(20, 32))]
    for text in texts:
        drafter.add(text.slot, [], [], [], None)

    def proposed(most: Sequence[int]) -> list[list[int]]:
        return [proposal.token_ids for proposal in drafter.propose_all(texts, most)]

    # The step's budget of 24 tokens: 9 and 2 are read, of 11 all.
    assert proposed([4, 4, 0]) == [texts[0].greedy(4), texts[1].greedy(4), []]
    texts[0].tokens += [*texts[0].greedy(2), 1, 2]  # two drafts were right, two not
    texts[1].tokens += texts[1].greedy(5)
    before = model.num_computed
    assert proposed([3, 9, 5]) == [texts[0].greedy(3), texts[1].greedy(2), texts[2].greedy(5)]  # 2 pages hold 8 tokens
    assert model.num_computed - before == (2 + 2) + (2 + 1) + (11 + 4)
    assert proposed([0, -1, 0]) == [[], [], []]
    long = Text(0, range(60), range(32, 40))
    long.held += range(12, 20)
    drafter.add(0, [], [], [], None)
    assert drafter.propose_all([long], [2]) == drafter.propose_all([long], [2]) == [Proposal([])]  # read in parts
    assert drafter.propose_all([long], [20]) == [Proposal(long.greedy(5))]  # as far as its context goes
    for text in (*texts, long):
        drafter.remove(text.slot)
    drafter.add(0, [], [], [], None)
    model.breaks = True
    assert drafter.propose_all([Text(0, [1], [1])], [2]) == [Proposal([])]
    assert drafter.seconds(BatchShape.decoding(1, 1), 1) == float("inf")


def test_pages_are_those_of_any_sequence_that_wrote_this_text() -> None:
    model = HashedModel()
    drafter = ModelDrafter(model, Passes())
    first = Text(0, range(12), range(4))
    drafter.add(0, [], [], [], None)
    drafter.propose_all([first], [2])
    first.tokens += first.greedy(3)
    assert drafter.propose_all([first], [1])[0].token_ids == first.greedy(1)  # three pages are whole
    drafter.remove(0)
    # The same prefix from the cache: its KV is there. The last token is computed again.
    second = Text(2, range(12), [0, 1, 2, 7])
    drafter.add(2, [], [], [], None)
    before = model.num_computed
    assert drafter.propose_all([second], [1])[0].token_ids == second.greedy(1)
    assert model.num_computed - before == 1
    # Its second page is replaced by one in which other text is: computed again from there on.
    second.held[1] = 3
    second.tokens.append(4)
    before = model.num_computed
    assert drafter.propose_all([second], [1])[0].token_ids == second.greedy(1)
    assert model.num_computed - before == 13 - PAGE
    drafter.remove(2)
    # Page 2 has another text now; nothing is taken from it.
    third = Text(4, [9] * 8, [5, 2])
    fourth = Text(6, range(12), [0, 1, 2, 9])
    for text in (third, fourth):
        drafter.add(text.slot, [], [], [], None)
    drafter.propose_all([third], [1])
    before = model.num_computed
    assert drafter.propose_all([fourth], [1])[0].token_ids == fourth.greedy(1)
    assert model.num_computed - before == 12 - 2 * PAGE


def test_it_is_asked_where_its_own_time_pays() -> None:
    passes = Passes()
    drafter = ModelDrafter(HashedModel(), passes)
    # A step takes 1 s, and 0.05 s for each draft.
    choice = SpeculativeDecoding([drafter], lambda shape: 1.0 + 0.05 * (shape.tokens - 1), most=8)
    text = Text(0, range(9), range(6))
    choice.add(0, text.tokens, [], [], None)
    shape = BatchShape()
    shape.add(8, 1)
    lengths = []
    for passes.each_s in (0.0, 0.05, 0.3, 1.0):
        chosen = choice.choose([text], shape, 8)
        lengths.append(len(chosen.get(0, [])))
        assert choice.may_follow([text], shape) == (lengths[-1] > 0)
        if chosen:
            assert chosen[0] == text.greedy(lengths[-1])
            choice.verified(text, text.num_tokens - 1, lengths[-1], 0)
            choice.remove(0)  # what the sequence has taught
            choice.add(0, text.tokens, [], [], None)
    assert lengths[0] >= lengths[1] >= 2 and lengths[3] == 0, lengths
    # When it has not paid for long, its cost is believed less and less, until it is measured again.
    for _ in range(5000):
        if choice.choose([text], shape, 8):
            break
    assert drafter.seconds(shape, 1) == pytest.approx(1.0, rel=0.1)


def test_the_reading_of_a_prompt_is_spread_over_many_passes() -> None:
    passes = Passes(1.0)
    drafter = ModelDrafter(HashedModel(), passes)
    text, single = Text(0, range(21), range(8)), BatchShape.decoding(1, 21)
    drafter.add(0, [], [], [], None)
    assert drafter.seconds(single, 3) == 3.0
    drafter.propose_all([text], [4])
    assert passes.observed == [21, 1]
    once_s = drafter.seconds(single, 3)
    assert 1.0 < once_s / 3.0 < 1.1  # 20 more tokens, over at least 256 passes
    for _ in range(100):
        text.tokens[-1] += 1
        drafter.propose_all([text], [4])
    assert 3.0 < drafter.seconds(single, 3) < once_s


def test_tokens_of_one_vocabulary_alone_end_drafts() -> None:
    model = HashedModel()
    text = Text(0, range(9), range(6))
    first = text.greedy(8)
    model.vocab_size = max(first[:4]) + 1
    known = next((i for i, token in enumerate(first) if token >= model.vocab_size), 8)
    drafter = ModelDrafter(model, Passes())
    drafter.add(0, [], [], [], None)
    assert drafter.propose_all([text], [8])[0].token_ids == first[:known] and known >= 4
    text.tokens.append(model.vocab_size)
    assert drafter.propose_all([text], [8]) == [Proposal([])]
    text.tokens.append(1)
    assert drafter.propose_all([text], [8]) == [Proposal([])]


# ---------------------------------------------------------------- a replica with a draft model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and another of the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    return make_tiny_llama(folder / "target"), make_tiny_llama(folder / "draft", seed=8)


def always(model: Path, config: WorkerConfig) -> Components:
    """The parts of a replica whose only drafter is the draft model, if it has one. Drafts always pay: a step takes 1 s
    whatever it holds, and a pass of the draft model nothing."""
    parts = load_components(model, config)
    drafters = [] if parts.draft_model is None else [ModelDrafter(parts.draft_model, Passes())]
    return parts._replace(costs=CostStore(), drafters=drafters)


@pytest.fixture
def engine(folders: tuple[Path, Path]) -> Iterator[Callable[..., Engine]]:
    """Makes an engine; at the end no page is lost. `draft`: number of the draft model's folder."""
    with checked_engines(folders[0], kv_tokens=4096, num_speculative_tokens=6) as make:

        def made(draft: int | None = None, **config: object) -> Engine:
            if draft is not None:
                config |= {"draft_model": str(folders[draft]), "speculation": "auto"}
            return make(always, **config)

        yield made


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> list[Finished]:
    """What the model says without drafts."""
    with checked_engines(folders[0], kv_tokens=4096) as make:
        return make().generate(PROMPTS, EACH)


@pytest.mark.parametrize(("draft", "overlap"), [(0, True), (1, False)], ids=["itself, overlap", "another"])
def test_no_output_changes(engine, plain: list[Finished], draft: int, overlap: bool) -> None:
    one = engine(draft, overlap=overlap)
    assert said(one.generate(PROMPTS, EACH)) == said(plain)
    load = one.load()
    assert load.drafted["model"] > 50 and load.drafted.keys() == {"model"}
    assert (load.accepted["model"] > 50) == (draft == 0)


def test_preempted(engine, plain: list[Finished], monkeypatch) -> None:
    monkeypatch.setattr("worker.scheduler.kv_demand.peak_pages", pages_now)
    one = engine(0, kv_tokens=112, page_size=4, token_budget=64)
    assert said(one.generate(PROMPTS, EACH)) == said(plain)
    assert one.load().preemptions >= 1 and one.load().accepted["model"] > 20


def test_resumed_and_aborted(engine, plain: list[Finished]) -> None:
    """Sequences go on here after any number of tokens, and half of them are aborted while drafts are verified."""
    one = engine(0, overlap=True)
    heads = [each.token_ids[: 1 + i % (len(each.token_ids) - 1)] for i, each in enumerate(plain)]
    for i, (prompt, head) in enumerate(zip(PROMPTS, heads, strict=True)):
        one.add(Generate(request_id=str(i), prompt_ids=prompt, output_ids=list(head), sampling=EACH[i]))
    heard = [list(head) for head in heads]

    def hear(some: Iterable[Output]) -> None:
        for output in some:
            heard[int(output.request_id)] += output.token_ids

    while not one.load().drafted:
        if not one.has_work:
            one.readiness.wait()
        hear(one.step())
    one.abort([str(i) for i in range(0, len(PROMPTS), 2)])
    hear(outputs(one))
    assert [heard[i] for i in range(1, len(PROMPTS), 2)] == [each.token_ids for each in plain[1::2]]
    assert all(each.token_ids[: len(some)] == some for some, each in zip(heard, plain, strict=True))


def test_the_same_model_is_always_right(engine) -> None:
    each = [GREEDY] * len(PROMPTS)
    alone = engine().generate(PROMPTS, each)
    one = engine(0, page_size=4)
    for _ in range(2):  # the second time, after cached prompts
        before = one.load()
        assert said(one.generate(PROMPTS, each)) == said(alone)
        load = one.load()
        assert load.accepted["model"] == load.drafted["model"]
        assert load.steps - before.steps <= 2 + TOKENS // 6
    assert load.cached_tokens > 0


def test_on_two_ranks(folders: tuple[Path, Path], plain: list[Finished]) -> None:
    """The draft model runs on the first rank alone."""
    free = [i for i, sampling in enumerate(EACH) if sampling.grammar is None]
    prompts, each = [PROMPTS[i] for i in free], [EACH[i] for i in free]

    def with_draft(parts: Components, config: WorkerConfig) -> Components:
        draft = DraftModel(Path(str(config.draft_model)), config, parts.executor)
        return parts._replace(drafters=[ModelDrafter(draft, Passes())], draft_model=draft)

    settings = {"draft_model": str(folders[0]), "speculation": "auto", "num_speculative_tokens": 6}
    with pipeline(folders[0], tp=2, kv_tokens=2048, change=with_draft, **settings) as one:
        assert said(one.generate(prompts, each)) == said([plain[i] for i in free])
        assert one.load().accepted["model"] > 50


def test_memory_is_counted(folders: tuple[Path, Path], monkeypatch) -> None:
    monkeypatch.setattr("worker.executor.memory_budget.available_memory_bytes", lambda: 1 << 22)
    tokens = []
    for draft in (None, folders[1]):
        settings = {"device": "cpu", "dtype": "float32", "speculation": "auto", "draft_model": draft and str(draft)}
        with closing(Engine(folders[0], WorkerConfig.model_validate(settings))) as one:
            tokens.append(one.executor.num_pages * one.executor.page_size)
            config, dtype, device = one.executor.model_config, one.executor.dtype, one.executor.device
    weights = sum(tensor.nbytes for tensor in load_file(folders[1] / "model.safetensors").values())
    own = DraftBytes.of(folders[1], dtype, device, 64)
    assert own.per_token == token_bytes(config, dtype)  # of the same shape
    assert own.fixed == pytest.approx(weights, rel=0.01)
    assert tokens[1] == pytest.approx(tokens[0] / 2 * (1 - weights / (1 << 22)), abs=16)
    monkeypatch.setattr("worker.executor.memory_budget.available_memory_bytes", lambda: own.fixed)
    with pytest.raises(ValueError, match=r"\b0 tokens .*draft_model .*draft\b"):
        Engine(folders[0], WorkerConfig.model_validate(settings))


def test_what_cannot_draft_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(folders[1], tmp_path / "other")
    changed = json.loads((folders[1] / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["!"], vocabulary["$"] = vocabulary["$"], vocabulary["!"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(changed))
    settings = {"device": "cpu", "speculation": "auto", "draft_model": str(tmp_path / "other")}
    with pytest.raises(ValueError, match=r"other .*target: 2 tokens .*'!'"):
        Engine(folders[0], WorkerConfig.model_validate(settings))
    for changes, why in (({"pp": 2}, "pp=1, not pp=2"), ({"speculation": "off"}, "needs speculation auto")):
        with pytest.raises(ValidationError, match=why):
            WorkerConfig.model_validate(settings | changes)
    # Sizes may differ by padding. Without a tokenizer, they alone tell.
    longer = dummy_models.write("tiny", tmp_path / "longer")
    shutil.copy(folders[0] / "tokenizer.json", longer)
    check_draft_model(longer, folders[0])
    (longer / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"longer .*\d+ tokens.*target .*\b260\b"):
        check_draft_model(longer, folders[0])
