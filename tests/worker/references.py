"""What tiny models say according to `transformers`, computed once for all tests that compare a model with it: alone, in
chunks, in stages, on several ranks. And the prompts of those tests.
"""

import hashlib
import random
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig

from bench.correctness.families import model_class
from tests.kept import kept
from tests.worker.conftest import Sequences
from worker.config import WorkerConfig
from worker.executor.model_runner import ModelRunner
from worker.messages import SamplingParams

NEW_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
# Prompts of one token, of several windows and chunks of attention, and of less than one page.
LENGTHS = (1, 33, 6, 70, 12, 27, 40, 3, 19)


class Answer(NamedTuple):
    """`tokens`: a prompt and NEW_TOKENS greedy ones. `logits`: float32, [tokens - 1, vocabulary], of all but the
    last."""

    tokens: list[int]
    logits: torch.Tensor

    @property
    def new(self) -> list[int]:
        return self.tokens[-NEW_TOKENS:]


def settings(**changes: object) -> WorkerConfig:
    # No sequence starves: which is preempted must not depend on how fast the machine is.
    steady = {"device": "cpu", "dtype": "float32", "kv_tokens": 1024, "starvation_s": 3600.0}
    return WorkerConfig.model_validate({**steady, **changes})


def prompts(count: int) -> list[list[int]]:
    """Of up to 40 tokens."""
    rng = random.Random(3)
    return [[rng.randrange(4, 131) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def batch() -> list[list[int]]:
    """Prompts of LENGTHS, for every tiny model."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, 131, (length,), generator=generator).tolist() for length in LENGTHS]


def answers(folder: Path, asked: list[list[int]] | None = None) -> list[Answer]:
    """What `transformers` generates with a model for each prompt, alone, in float32. `asked` is `batch()` if None."""
    asked = batch() if asked is None else asked
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"])
    content = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return kept([content, asked, NEW_TOKENS], lambda: _generated(folder, asked))


@torch.inference_mode()
def _generated(folder: Path, asked: list[list[int]]) -> list[Answer]:
    class_ = model_class(AutoConfig.from_pretrained(folder).model_type)
    model = class_.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    how = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    given = []
    for prompt in asked:
        ids = torch.tensor([prompt])  # without a mask, its tokens 0 would be padding
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        given.append(Answer(tokens[0].tolist(), model(tokens).logits[0, :-1].float()))
    return given


def expected(folder: Path, asked: list[list[int]] | None = None) -> list[list[int]]:
    """The new tokens of `answers`."""
    return [answer.new for answer in answers(folder, asked)]


def generated(runner: ModelRunner, asked: list[list[int]], chunk: int = 7) -> list[Answer]:
    """What a runner gives, with all sequences in each step, their prompts in chunks of so many tokens."""
    sequences = Sequences(runner)
    for slot, prompt in enumerate(asked):
        sequences.add(slot, prompt)
    ends = [len(prompt) + NEW_TOKENS for prompt in asked]
    while unfinished := [slot for slot, end in enumerate(ends) if len(sequences.tokens[slot]) < end]:
        sequences.advance(dict.fromkeys(unfinished, chunk))
    return [Answer(sequences.tokens[slot], torch.cat(sequences.logits[slot])) for slot in range(len(asked))]


def assert_same(got: list[Answer], wanted: list[Answer], tolerance: float = 1e-4) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.tokens == other.tokens
        torch.testing.assert_close(one.logits, other.logits, atol=tolerance, rtol=tolerance)
