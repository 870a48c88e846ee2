"""Hashed features of a request at its arrival: indices of a sparse vector of zeros and ones.

Hashing needs no vocabulary and bounds the memory (feature hashing, Weinberger et al., arXiv 0902.2206).
"""

import zlib

import numpy as np

from worker.messages import SamplingParams

BITS = 16
NUM_FEATURES = 1 << BITS
# Tokens at both ends of a prompt whose words and pairs of words count: the beginning tells the application, the end the
# task. Between them is mostly what the task is about.
FIRST_TOKENS, LAST_TOKENS = 64, 192
PREFIXES = (16, 64, 256, 1024)  # lengths of prefixes that count as one feature each
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing


def arrival_features(prompt_ids: list[int], sampling: SamplingParams) -> np.ndarray:
    """Indices of the features of a request, distinct, uint16 [n], below `NUM_FEATURES`.

    | feature | of what |
    | --- | --- |
    | words, pairs of words | tokens at both ends of the prompt |
    | prefixes | the first 16, 64, 256 and 1,024 tokens: requests of one application share them |
    | sizes | of the prompt and of `max_tokens`, in half powers of two |
    | form | grammar, sampling, stop conditions |
    """
    count = len(prompt_ids)
    ends = prompt_ids if count <= FIRST_TOKENS + LAST_TOKENS else prompt_ids[:FIRST_TOKENS] + prompt_ids[-LAST_TOKENS:]
    words = np.array(ends, dtype=np.uint64)
    keys = [
        1 + 2 * words,
        (words[:-1] << np.uint64(32)) + 2 * words[1:],
        np.array([_code(name) for name in _names(prompt_ids, sampling)], dtype=np.uint64),
    ]
    hashed = np.concatenate(keys) * _MULTIPLIER >> np.uint64(64 - BITS)
    return np.unique(hashed).astype(np.uint16)


def _names(prompt_ids: list[int], sampling: SamplingParams) -> list[object]:
    head = np.array(prompt_ids[: PREFIXES[-1]], dtype=np.uint32)
    names: list[object] = ["any"]
    names += [("prefix", zlib.crc32(head[:length].tobytes())) for length in PREFIXES if length <= len(head)]
    names.append(("prompt", _half_powers(len(prompt_ids))))
    names.append(("limit", _half_powers(sampling.max_tokens)))
    names.append(("greedy", sampling.temperature == 0))
    names.append(("ignore_eos", sampling.ignore_eos))
    if sampling.grammar is not None:
        names.append(("kind", sampling.grammar.kind))
        names.append(("grammar", zlib.crc32(sampling.grammar.text.encode())))
    return names


def _half_powers(size: int) -> int:
    return int(2 * np.log2(max(1, size)))


def _code(name: object) -> int:
    """A key that is the same in every process, unlike `hash`."""
    return zlib.crc32(repr(name).encode()) << 1
