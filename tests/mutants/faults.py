"""Fifty faults that a person could make: a wrong edge, a forgotten release or reset, a stale value, a lost event.

Each changes what the product does. None was chosen because a test finds it, or because none does, so a fault that the
tests miss stays in the list.
"""

from typing import NamedTuple

Tests = tuple[str, ...]
SCHEDULER: Tests = ("tests/worker/scheduler",)
TREE: Tests = ("tests/radix",)
SAMPLER: Tests = ("tests/worker/sampling",)
PLACEMENT: Tests = (
    "tests/router/fleet/test_placement.py",
    "tests/router/fleet/test_popularity.py",
    "tests/router/fleet/test_optimistic_prefixes.py",
    "tests/router/fleet/test_known_replica.py",
    "tests/router/fleet/test_fleet.py",
    "tests/router/replicas/test_peers.py",
)
LEXER: Tests = ("tests/router/formats",)
MESSAGES: Tests = (
    "tests/worker/test_step.py",
    "tests/worker/engine/test_server.py",
    "tests/worker/engine/test_pooling.py",
    "tests/worker/engine/test_adapters.py",
)
PACKAGES: dict[str, Tests] = {
    "scheduler": SCHEDULER,
    "tree": TREE,
    "sampler": SAMPLER,
    "placement": PLACEMENT,
    "lexer": LEXER,
    "messages": MESSAGES,
}


class Fault(NamedTuple):
    """A change of one file of the product.

    | field | meaning |
    | --- | --- |
    | `name` | says what goes wrong |
    | `file` | the changed file |
    | `before`, `after` | a text that stands exactly once in it, and what replaces it |
    | `tests` | the tests of the fault's own package, one of `PACKAGES` |

    Paths are relative to the repository.
    """

    name: str
    file: str
    before: str
    after: str
    tests: Tests

    @property
    def package(self) -> str:
        """The name of the package that `tests` are of."""
        return next(name for name, tests in PACKAGES.items() if tests == self.tests)

    def put_into(self, text: str) -> str:
        """The content of the file with the fault. Raises ValueError unless `before` stands in it exactly once."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: its text stands {count} times in {self.file}, and not once")
        return text.replace(self.before, self.after)


FAULTS = [
    # ------------------------------------------------------------ the scheduler
    Fault(
        "shared-pages-count-as-freed-twice",
        "worker/scheduler/kv_demand.py",
        "released = seq.num_pages - seq.num_shared\n",
        "released = seq.num_pages\n",
        SCHEDULER,
    ),
    Fault(
        "refused-admission-keeps-its-lock",
        "worker/scheduler/admission.py",
        "        self._kv_cache.free(seq, keep=False)\n        return False\n",
        "        return False\n",
        SCHEDULER,
    ),
    Fault(
        "preempted-sequence-stays-in-the-budget",
        "worker/scheduler/step_builder.py",
        "        if size:\n            self.budget.remove(seq.num_computed, size)\n",
        "",
        SCHEDULER,
    ),
    Fault(
        "ranks-keep-pages-that-were-replaced",
        "worker/scheduler/kv_cache_manager.py",
        "            pages[twice] = self.tree.match(keys).pages[twice]\n            seq.num_sent_pages = 0\n",
        "            pages[twice] = self.tree.match(keys).pages[twice]\n",
        SCHEDULER,
    ),
    Fault(
        "checkpoint-at-a-position-that-is-past",
        "worker/scheduler/kv_cache_manager.py",
        "position <= seq.num_computed or",
        "position < seq.num_computed or",
        SCHEDULER,
    ),
    Fault(
        "window-given-back-before-the-tree-may-get-it",
        "worker/scheduler/window_pages.py",
        "ends = table.num_confirmed[rows] // size * size\n",
        "ends = table.num_confirmed[rows]\n",
        SCHEDULER,
    ),
    Fault(
        "preempts-though-pages-are-about-to-be-freed",
        "worker/scheduler/preemption.py",
        "room == 0 and not self._is_ending and",
        "room == 0 and",
        SCHEDULER,
    ),
    Fault(
        "new-client-inherits-a-counter",
        "worker/scheduler/fair_share.py",
        "self.values[index], self.to_come[index], self.lately[index] = value, 0.0, 0.0\n",
        "self.to_come[index], self.lately[index] = 0.0, 0.0\n",
        SCHEDULER,
    ),
    Fault(
        "outdated-prefix-counts-as-looked-up",
        "worker/scheduler/waiting_queue.py",
        "seq.estimated_at_step = step - LOOKUP_EVERY_STEPS\n",
        "seq.estimated_at_step = step\n",
        SCHEDULER,
    ),
    # ------------------------------------------------------------ the tree
    Fault(
        "rest-of-a-trimmed-leaf-was-never-used",
        "radix/tree.py",
        "        upper.last_used = node.last_used\n",
        "",
        TREE,
    ),
    Fault(
        "lease-stays-on-a-leaf-that-is-gone",
        "radix/tree.py",
        "            for lease in leaf.own_leases:\n                lease.node = parent\n",
        "",
        TREE,
    ),
    Fault(
        "locked-node-goes-with-its-leaf",
        "radix/tree.py",
        "parent.children or parent.locks or parent in self.points",
        "parent.children or parent in self.points",
        TREE,
    ),
    Fault(
        "last-of-the-leased-checkpoints-goes-first",
        "radix/tree.py",
        "evicted = evicted or node\n",
        "evicted = node\n",
        TREE,
    ),
    Fault(
        "conversation-counts-as-a-common-prefix",
        "radix/windows.py",
        "if self._num_pinned_by[node] < (3 if len(node.children) == 1 else 2):",
        "if self._num_pinned_by[node] < 2:",
        TREE,
    ),
    Fault(
        "new-lease-does-not-renew-the-others",
        "radix/leases.py",
        "        known.renewed_s = now_s\n",
        "",
        TREE,
    ),
    Fault(
        "slot-is-free-while-nodes-have-its-bit",
        "radix/index.py",
        "if taken < most:",
        "if taken <= most:",
        TREE,
    ),
    Fault(
        "only-one-empty-parent-is-taken-out",
        "radix/index.py",
        "        while node != ROOT and not holders[node] and children[node] is None:\n",
        "        if node != ROOT and not holders[node] and children[node] is None:\n",
        TREE,
    ),
    Fault(
        "split-during-a-snapshot-is-told-twice",
        "radix/snapshot.py",
        "                told.add(event.upper)\n",
        "",
        TREE,
    ),
    # ------------------------------------------------------------ the sampler
    Fault(
        "presence-penalty-on-tokens-of-the-prompt",
        "worker/sampling/logits_processors.py",
        "presence * (counts > 0)",
        "presence * (counts >= 0)",
        SAMPLER,
    ),
    Fault(
        "end-tokens-banned-for-one-draft-too-long",
        "worker/sampling/sampling_metadata.py",
        "if num_output >= self.params.min_tokens:",
        "if num_output > self.params.min_tokens:",
        SAMPLER,
    ),
    Fault(
        "drafts-count-for-the-next-owner-of-a-slot",
        "worker/sampling/sampler.py",
        "if self._states[slot] is state:",
        "if self._states[slot] is not None:",
        SAMPLER,
    ),
    Fault(
        "seed-zero-is-no-seed",
        "worker/sampling/sampler.py",
        "if sampling.seed is None else",
        "if not sampling.seed else",
        SAMPLER,
    ),
    Fault(
        "min-p-before-top-p",
        "worker/sampling/topk_topp_cpu.py",
        "least = np.where((top_k > 0) & (top_p < 1), 0.0, min_p)\n",
        "least = min_p\n",
        SAMPLER,
    ),
    Fault(
        "one-tie-too-few",
        "worker/sampling/topk_topp_cpu.py",
        "(np.cumsum(ties) <= room)",
        "(np.cumsum(ties) < room)",
        SAMPLER,
    ),
    Fault(
        "top-k-is-not-normalised",
        "worker/sampling/topk_topp.py",
        "        kept.div_(kept.sum(dim=1, keepdim=True, dtype=torch.float64).float())\n",
        "",
        SAMPLER,
    ),
    Fault(
        "log-probabilities-of-the-first-rows-again",
        "worker/sampling/logprobs.py",
        "logits[start : start + _ROWS], dim=1",
        "logits[:_ROWS], dim=1",
        SAMPLER,
    ),
    # ------------------------------------------------------------ placement
    Fault(
        "attention-within-a-prompt-costs-double",
        "router/fleet/placement.py",
        '(c["token_s"] + c["product_s"] * (cached + missing / 2))',
        '(c["token_s"] + c["product_s"] * (cached + missing))',
        PLACEMENT,
    ),
    Fault(
        "overloaded-replica-has-negative-costs",
        "router/fleet/placement.py",
        'busy = np.minimum(MAX_BUSY_SHARE, c["tokens_s"] * c["token_s"] / share)\n',
        'busy = c["tokens_s"] * c["token_s"] / share\n',
        PLACEMENT,
    ),
    Fault(
        "home-has-the-branch-without-a-checkpoint",
        "router/fleet/fleet.py",
        "goes_on_anywhere &= not index.has_checkpoints\n",
        "goes_on_anywhere |= not index.has_checkpoints\n",
        PLACEMENT,
    ),
    Fault(
        "first-token-leaves-the-table-stale",
        "router/fleet/fleet.py",
        "booked.has_first_token = True\n                self._stale.add(booked.booking.replica_id)\n",
        "booked.has_first_token = True\n",
        PLACEMENT,
    ),
    Fault(
        "peers-newest-booking-counts-twice",
        "router/fleet/fleet.py",
        "peer.number > replica.load.peers_seen.get(peer.router, 0)",
        "peer.number >= replica.load.peers_seen.get(peer.router, 0)",
        PLACEMENT,
    ),
    Fault(
        "pace-of-tokens-does-not-fade",
        "router/fleet/fleet.py",
        '        candidates["tokens_s"] *= left\n',
        "",
        PLACEMENT,
    ),
    Fault(
        "copy-that-ends-at-a-mark-is-no-copy",
        "router/fleet/popularity.py",
        "np.searchsorted(np.sort(cached), lengths[1:])",
        'np.searchsorted(np.sort(cached), lengths[1:], side="right")',
        PLACEMENT,
    ),
    Fault(
        "forgotten-replica-keeps-its-prefixes",
        "router/fleet/optimistic_prefixes.py",
        "            if entry[1] == slot:\n                self._drop(slot, entry[2])\n            else:\n",
        "            if entry[1] != slot:\n",
        PLACEMENT,
    ),
    # ------------------------------------------------------------ the lexer
    Fault(
        "marker-that-lacks-its-last-character-is-text",
        "router/formats/source.py",
        "max(self.at, end - markers.longest)",
        "max(self.at, end - markers.longest + 1)",
        LEXER,
    ),
    Fault(
        "mark-at-the-cut-is-lost",
        "router/formats/source.py",
        "if offset >= self.base}",
        "if offset > self.base}",
        LEXER,
    ),
    Fault(
        "thinking-goes-on-behind-a-call",
        "router/formats/reader.py",
        "        if self.is_thinking:\n            self.close_thinking(self.tokens_before_call)\n",
        "",
        LEXER,
    ),
    Fault(
        "number-with-an-exponent-is-an-integer",
        "router/formats/typed_values.py",
        "not (number[3] or number[4])",
        "not number[3]",
        LEXER,
    ),
    Fault(
        "escapes-of-a-pointer-in-the-wrong-order",
        "router/formats/typed_values.py",
        'part.replace("~1", "/").replace("~0", "~")',
        'part.replace("~0", "~").replace("~1", "/")',
        LEXER,
    ),
    Fault(
        "last-line-end-of-a-cut-value-is-lost",
        "router/formats/tagged_call.py",
        'source.text[at - 1] == "\\n" and not (marker is None and source.ended):',
        'source.text[at - 1] == "\\n":',
        LEXER,
    ),
    Fault(
        "no-comma-behind-an-empty-object",
        "router/formats/quoted_call.py",
        "has_opened = may_follow = False\n",
        "may_follow = False\n",
        LEXER,
    ),
    Fault(
        "thinking-may-begin-behind-thinking",
        "router/formats/lexer.py",
        "                self._is_first = False\n                continue\n",
        "                continue\n",
        LEXER,
    ),
    # ------------------------------------------------------------ messages
    Fault(
        "events-before-a-checkpoint-come-again",
        "worker/messages.py",
        "            yield event\n            told = before\n",
        "            yield event\n",
        MESSAGES,
    ),
    Fault(
        "reloaded-adapter-reads-the-former-ones-cache",
        "worker/messages.py",
        '"\\0".join((self.name, self.path, self.version))',
        '"\\0".join((self.name, self.path))',
        MESSAGES,
    ),
    Fault(
        "chunks-left-of-a-plan-keep-their-numbers",
        "worker/step.py",
        "            left[:, 0] = new_index[left[:, 0]]\n",
        "",
        MESSAGES,
    ),
    Fault(
        "pages-of-chunks-left-out-stay",
        "worker/step.py",
        "self.pages[:, np.repeat(chosen, self.num_pages)]",
        "self.pages",
        MESSAGES,
    ),
    Fault(
        "adapters-and-copies-change-places",
        "worker/step.py",
        "lists += [copies.reshape(-1, 7), adapters.reshape(-1, 3)]\n",
        "lists += [adapters.reshape(-1, 3), copies.reshape(-1, 7)]\n",
        MESSAGES,
    ),
    Fault(
        "number-of-an-adapter-for-its-slot",
        "worker/step.py",
        "slots[self.adapters[:, 0]] = self.adapters[:, 1]\n",
        "slots[self.adapters[:, 0]] = self.adapters[:, 2]\n",
        MESSAGES,
    ),
    Fault(
        "checkpoints-count-as-events",
        "worker/engine/server.py",
        "self._next_event += len(message.events)\n",
        "self._next_event += len(events)\n",
        MESSAGES,
    ),
    Fault(
        "snapshot-ends-before-its-last-events",
        "worker/engine/server.py",
        "complete = snapshot.walk.is_done and not snapshot.pending\n",
        "complete = snapshot.walk.is_done\n",
        MESSAGES,
    ),
]
