"""What a plan of split-KV attention covers: each key that a query sees once, whatever the batch."""

from dataclasses import replace

import numpy as np
import pytest

from kernels.attention import split_kv_plan
from kernels.attention.interface import AttentionBatch, SharedPrefixes, slot_mapping, token_positions
from kernels.attention.split_kv_plan import COUNT, FIRST, FIRST_KEY, LAST_KEY, PAGE, POSITION

PAGE_SIZE, SCRATCH = 16, 777


def random_batch(generator: np.random.Generator, with_groups: bool) -> tuple[AttentionBatch, SharedPrefixes]:
    """Single tokens and chunks in random rows; with groups, about half of the single tokens share prefixes."""
    count = int(generator.integers(4, 12))
    lengths = np.ones(count, dtype=np.int32)
    singles = int(generator.integers(4 if with_groups else 0, count + 1))
    lengths[singles:] = generator.integers(2, 60, count - singles)
    starts = generator.integers(0, 700, count).astype(np.int32)
    tables = generator.permutation(count * 60).reshape(count, 60).astype(np.int32)
    rows = generator.permutation(count).astype(np.int32)
    if not with_groups:
        return AttentionBatch(tables, rows, starts, lengths), SharedPrefixes.none()
    members = generator.permutation(singles)[:4].astype(np.int32)
    num_pages = generator.integers(1, 20, 2).astype(np.int32)
    for group, pages in enumerate(num_pages):
        leader, follower = members[2 * group : 2 * group + 2]
        tables[rows[follower], :pages] = tables[rows[leader], :pages]
        starts[[leader, follower]] = pages * PAGE_SIZE + generator.integers(0, 50, 2)
    return AttentionBatch(tables, rows, starts, lengths), SharedPrefixes(members, np.array([0, 2, 4], "i4"), num_pages)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("with_groups", [False, True])
def test_every_key_once(window: int | None, with_groups: bool) -> None:
    generator = np.random.default_rng(3)
    for _ in range(15):
        batch, shared = random_batch(generator, with_groups)
        padding = int(generator.integers(0, 4))
        behind = 0 if with_groups else int(generator.integers(0, 4))
        tile, most, step = int(generator.choice([1, 4, 16])), int(generator.choice([3, 66])), 32
        lists = split_kv_plan.tables(batch, shared, PAGE_SIZE, repeat=window is not None, spare=1)
        lists.pages[-1] = SCRATCH
        together = shared if window is None else SharedPrefixes.none()
        plan = split_kv_plan.work(
            batch,
            together,
            split_kv_plan.of_groups(together, lists.groups, PAGE_SIZE, tile),
            lists.chunks,
            shared.pages_of(len(batch.rows)).astype(np.int64) * PAGE_SIZE,
            window,
            tile_tokens=tile,
            most=most,
            step=step,
            least=int(generator.choice([1, 384])),
            behind=behind,
            padding=padding,
            scratch=len(lists.pages) - 1,
        )
        sizes = plan.items[:, LAST_KEY] - plan.items[:, FIRST_KEY]
        assert (np.diff(sizes) <= 0).all()
        owners = np.repeat(np.arange(len(batch.rows)), batch.lengths)
        positions = np.concatenate((token_positions(batch), np.zeros(padding, dtype=np.int64)))
        pages: list[dict[int, int]] = [{} for _ in positions]  # by token, the page of each key that is read
        parts: list[list[int]] = [[] for _ in positions]
        for item in plan.items.tolist():
            first, count = item[FIRST], item[COUNT]
            assert count <= tile
            tokens = range(first - behind, first - behind + count) if first >= 0 else together.members[~first:][:count]
            for number, token in enumerate(tokens):
                assert first < 0 or positions[token] == item[POSITION] + number
                for key in range(item[FIRST_KEY], item[LAST_KEY]):
                    assert key not in pages[token]
                    pages[token][key] = int(lists.pages[item[PAGE] + key // PAGE_SIZE])
                parts[token].append(item[-1])
        for token, position in enumerate(positions.tolist()):
            seen = {key: page for key, page in pages[token].items() if key <= position}
            least = 0 if window is None else max(0, position - window + 1)
            assert set(range(least, position + 1)) <= set(seen)
            if token < len(owners):
                table = batch.tables[batch.rows[owners[token]]]
                assert all(page == table[key // PAGE_SIZE] for key, page in seen.items())
            else:
                assert seen == {0: SCRATCH}
            expected = int(plan.counts[behind + token])
            assert sorted(parts[token]) == (list(range(expected)) if expected else [-1])
        assert plan.counts[:behind].tolist() == [0] * behind
        assert plan.slots.tolist() == (np.cumsum(plan.counts) - plan.counts).tolist()


def test_rows_of_tokens() -> None:
    batch, _ = random_batch(np.random.default_rng(5), False)
    owners = np.repeat(np.arange(len(batch.rows)), batch.lengths)
    rows = split_kv_plan.token_rows(batch, 8, PAGE_SIZE, 3, SCRATCH)
    assert rows[:-3].tolist() == slot_mapping(batch, owners, token_positions(batch), 8, PAGE_SIZE).tolist()
    assert rows[-3:].tolist() == [SCRATCH * 8 * PAGE_SIZE] * 3


def test_other_tables_are_refused() -> None:
    """The functions are compiled for one layout, at import: none is compiled within a step."""
    batch, shared = random_batch(np.random.default_rng(5), False)
    for tables in (batch.tables.astype(np.int64), batch.tables[:, ::2]):
        with pytest.raises(TypeError):
            split_kv_plan.tables(replace(batch, tables=tables), shared, PAGE_SIZE, repeat=False)
