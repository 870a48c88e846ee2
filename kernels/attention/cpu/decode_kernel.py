"""Attention of single queries over paged keys and values, compiled by numba. Reads the pages in place, each once.

A query takes its tokens in blocks, with the softmax kept as a running maximum and sum
(https://arxiv.org/abs/2205.14135). All arithmetic is in float32, whatever the dtype of the pages.
"""

import math

import numpy as np
from numba import carray, cfunc, njit, types

from kernels.intrinsics import claim, float32_at, float_of_bits, int32_at, prefetch, uint16_at, widened

# Index of each argument in the int64 array that a kernel gets. The first ten are numbers:
#
# | argument | number |
# | --- | --- |
# | NEXT | items claimed so far, 0 at first |
# | QUERIES, KV_HEADS, HEAD_DIM | sizes |
# | GROUP | query heads of a KV head |
# | HEAD_STRIDE | rows of K from one KV head of a token to the next |
# | Q_STRIDE | elements of Q from one place to the next |
# | NUM_ROWS, NUM_TOKENS, NUM_PLACES | lengths of K and V, of TOKENS, and of Q and OUT |
#
# The others are addresses of arrays:
#
# | argument | array |
# | --- | --- |
# | Q, OUT | float32 [places, kv_heads, group, head_dim]; OUT is contiguous |
# | K, V | [rows, head_dim], in the pages' dtype |
# | TOKENS | int32: of each token that queries see, the row of its first KV head |
# | PLACES | int32: where each query stands in Q and OUT |
# | FIRSTS, COUNTS | int32: query i sees COUNTS[i] tokens from TOKENS[FIRSTS[i]] on |
# | FACTORS | float32: the scale of scores, and the softcap or 0 |
# | SINKS | float32 [kv_heads, group]: scores that join the sums of weights; the address is 0 if there are none |
NEXT, QUERIES, KV_HEADS, GROUP, HEAD_DIM, HEAD_STRIDE, Q_STRIDE, NUM_ROWS, NUM_TOKENS, NUM_PLACES = range(10)
Q, OUT, K, V, TOKENS, PLACES, FIRSTS, COUNTS, FACTORS, SINKS = range(10, 20)
NUM_ARGUMENTS = 20

_BLOCK = 128
_AHEAD = 16  # distance in tokens from the token that is computed to the one that is prefetched
_LINE_BYTES, _FLOAT32_BYTES = 64, 4

# Sums may be reordered and products contracted, but infinities and NaNs are respected.
_FAST = {"contract", "reassoc", "nsz", "arcp", "afn"}
_LOG2_E = np.float32(1 / math.log(2))
# ln 2 in two parts, the first with few bits, so that x - n ln 2 loses nothing.
_LN2_HIGH, _LN2_LOW = np.float32(355 / 512), np.float32(math.log(2) - 355 / 512)
_TAYLOR = tuple(np.float32(1 / math.factorial(n)) for n in range(8))


@njit(fastmath=_FAST, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """e**x in float32 for x <= 0, to about 2 units in the last place, in a form that vectorises."""
    x = max(x, np.float32(-87))
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = (((_TAYLOR[7] * r + _TAYLOR[6]) * r + _TAYLOR[5]) * r + _TAYLOR[4]) * r + _TAYLOR[3]
    p = ((p * r + _TAYLOR[2]) * r + _TAYLOR[1]) * r + _TAYLOR[0]
    return p * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@njit(fastmath=_FAST)
def _score(q, k, v, keys, tokens, shift, scores, scale):  # type: ignore[no-untyped-def]
    """scores[g, j] = scale * q[g] @ keys[tokens[j] + shift], four tokens at a time.

    Meanwhile it prefetches the values of these tokens (`v` points to all values) and the keys of tokens `_AHEAD`
    further on (`k` points to all keys).
    """
    group, head_dim = q.shape
    line = _LINE_BYTES // keys.itemsize
    fours = tokens.size // 4 * 4
    for j in range(0, fours, 4):
        for i in range(j, j + 4):
            here = (tokens[i] + shift) * head_dim
            ahead = (tokens[min(i + _AHEAD, tokens.size - 1)] + shift) * head_dim
            for d in range(0, head_dim, line):
                prefetch(v, here + d)
                prefetch(k, ahead + d)
        k0, k1 = keys[tokens[j] + shift], keys[tokens[j + 1] + shift]
        k2, k3 = keys[tokens[j + 2] + shift], keys[tokens[j + 3] + shift]
        for g in range(group):
            row = q[g]
            s0 = s1 = s2 = s3 = np.float32(0)
            for d in range(head_dim):
                s0 += row[d] * widened(k0[d])
                s1 += row[d] * widened(k1[d])
                s2 += row[d] * widened(k2[d])
                s3 += row[d] * widened(k3[d])
            scores[g, j], scores[g, j + 1] = s0 * scale, s1 * scale
            scores[g, j + 2], scores[g, j + 3] = s2 * scale, s3 * scale
    for j in range(fours, tokens.size):
        k0 = keys[tokens[j] + shift]
        for g in range(group):
            row = q[g]
            s0 = np.float32(0)
            for d in range(head_dim):
                s0 += row[d] * widened(k0[d])
            scores[g, j] = s0 * scale


@njit(fastmath=_FAST)
def _cap(scores, cap):  # type: ignore[no-untyped-def]
    """scores = cap * tanh(scores / cap), in place."""
    for j in range(scores.size):
        e = _exp(np.float32(-2) * abs(scores[j]) / cap)
        scores[j] = math.copysign(cap * (np.float32(1) - e) / (np.float32(1) + e), scores[j])


@njit(fastmath=_FAST)
def _weigh(scores, total, top, sums):  # type: ignore[no-untyped-def]
    """Turns the scores of a block into weights relative to the running maximum, in place, and rescales the running sums
    to that maximum."""
    for g in range(scores.shape[0]):
        row, old = scores[g], top[g]
        new = old
        for j in range(row.size):
            new = max(new, row[j])
        added = np.float32(0)
        for j in range(row.size):
            weight = _exp(row[j] - new)
            row[j] = weight
            added += weight
        shrink = _exp(old - new)
        total[g] = total[g] * shrink + added
        top[g] = new
        for d in range(sums.shape[1]):
            sums[g, d] *= shrink


@njit(fastmath=_FAST)
def _add(values, tokens, shift, weights, sums):  # type: ignore[no-untyped-def]
    """sums[g] += weights[g, j] * values[tokens[j] + shift], four tokens at a time."""
    group, head_dim = sums.shape
    fours = tokens.size // 4 * 4
    for j in range(0, fours, 4):
        v0, v1 = values[tokens[j] + shift], values[tokens[j + 1] + shift]
        v2, v3 = values[tokens[j + 2] + shift], values[tokens[j + 3] + shift]
        for g in range(group):
            w0, w1, w2, w3 = weights[g, j], weights[g, j + 1], weights[g, j + 2], weights[g, j + 3]
            row = sums[g]
            for d in range(head_dim):
                row[d] += w0 * widened(v0[d]) + w1 * widened(v1[d]) + w2 * widened(v2[d]) + w3 * widened(v3[d])
    for j in range(fours, tokens.size):
        v0 = values[tokens[j] + shift]
        for g in range(group):
            row = sums[g]
            for d in range(head_dim):
                row[d] += weights[g, j] * widened(v0[d])


@njit(fastmath=_FAST)
def _attend(a, counter, k, v):  # type: ignore[no-untyped-def]
    """Claims pairs of a query and a KV head, and attends for each, until all are done. `a`: the arguments; k, v:
    pointers."""
    queries, kv_heads, group, head_dim = a[QUERIES], a[KV_HEADS], a[GROUP], a[HEAD_DIM]
    out = carray(float32_at(a[OUT]), (a[NUM_PLACES], kv_heads, group, head_dim))
    keys, values = carray(k, (a[NUM_ROWS], head_dim)), carray(v, (a[NUM_ROWS], head_dim))
    tokens = carray(int32_at(a[TOKENS]), (a[NUM_TOKENS],))
    places = carray(int32_at(a[PLACES]), (queries,))
    firsts, counts = carray(int32_at(a[FIRSTS]), (queries,)), carray(int32_at(a[COUNTS]), (queries,))
    factors = carray(float32_at(a[FACTORS]), (2,))
    sinks = carray(float32_at(a[SINKS]), (kv_heads, group))
    buffer = np.empty(group * _BLOCK, np.float32)
    sums = np.empty((group, head_dim), np.float32)
    top, total = np.empty(group, np.float32), np.empty(group, np.float32)
    while True:
        item = claim(counter)
        if item >= queries * kv_heads:
            return
        query, head = item // kv_heads, item % kv_heads
        place = places[query]
        offset = place * a[Q_STRIDE] + head * group * head_dim
        q = carray(float32_at(a[Q] + offset * _FLOAT32_BYTES), (group, head_dim))
        sums[:], total[:], top[:] = np.float32(0), np.float32(0), np.float32(-1e30)
        for start in range(0, counts[query], _BLOCK):
            count = min(_BLOCK, counts[query] - start)
            first = firsts[query] + start
            block, shift = tokens[first : first + count], head * a[HEAD_STRIDE]
            scores = buffer[: group * count].reshape(group, count)
            _score(q, k, v, keys, block, shift, scores, factors[0])
            if factors[1] > 0:
                _cap(buffer[: group * count], factors[1])
            _weigh(scores, total, top, sums)
            _add(values, block, shift, scores, sums)
        for g in range(group):
            row = out[place, head, g]
            factor = np.float32(1)
            if a[SINKS] != 0:
                new = max(top[g], sinks[head, g])
                factor = _exp(top[g] - new)
                total[g] = total[g] * factor + _exp(sinks[head, g] - new)
            for d in range(head_dim):
                row[d] = sums[g, d] * factor / total[g]


@cfunc(types.void(types.CPointer(types.int64)), fastmath=_FAST, cache=True)
def attend_float32(arguments):  # type: ignore[no-untyped-def]
    """The kernel for float32 pages."""
    a = carray(arguments, (NUM_ARGUMENTS,))
    _attend(a, arguments, float32_at(a[K]), float32_at(a[V]))


@cfunc(types.void(types.CPointer(types.int64)), fastmath=_FAST, cache=True)
def attend_bfloat16(arguments):  # type: ignore[no-untyped-def]
    """The kernel for bfloat16 pages."""
    a = carray(arguments, (NUM_ARGUMENTS,))
    _attend(a, arguments, uint16_at(a[K]), uint16_at(a[V]))
