"""The prefix cache: hits, locks, LRU eviction and version tags, against a naive model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sim.radix import Block, RadixCache

SIZE = 16


def insert(cache: RadixCache, blocks: tuple[int, ...], epoch: int = 0) -> Block:
    """Cache ``blocks`` as a request would, and leave them locked."""
    node, hits, _ = cache.match(blocks, len(blocks), epoch)
    cache.lock(node)
    node, _ = cache.extend(node, blocks, hits, len(blocks), epoch)
    return node


def test_a_prefix_hits_as_far_as_it_agrees_and_no_further_than_the_limit() -> None:
    cache = RadixCache(SIZE)
    insert(cache, (1, 2, 3, 4))
    assert cache.match((1, 2, 9, 4), 4, 0)[1] == 2
    assert cache.match((1, 2, 3, 4), 3, 0)[1] == 3
    assert cache.match((2, 3), 2, 0)[1] == 0


def test_the_same_block_id_under_another_parent_is_another_block() -> None:
    cache = RadixCache(SIZE)
    insert(cache, (1, 7))
    insert(cache, (2, 7))
    assert cache.total_tokens == 4 * SIZE


def test_locked_blocks_survive_eviction_and_unlocked_ones_go_oldest_leaf_first() -> None:
    cache = RadixCache(SIZE)
    held = insert(cache, (1, 2))
    old, young = insert(cache, (3, 4)), insert(cache, (5,))
    cache.unlock(old)
    cache.unlock(young)
    assert cache.evictable_tokens == 3 * SIZE
    assert cache.evict(1) == SIZE
    assert cache.match((3, 4), 2, 0)[1] == 1  # the leaf 4 went, its parent stays
    assert cache.evict(10 * SIZE) == 2 * SIZE
    assert cache.match((1, 2), 2, 0)[1] == 2
    cache.unlock(held)
    assert cache.evict(10 * SIZE) == 2 * SIZE and cache.total_tokens == 0


def test_a_hit_renews_a_block() -> None:
    cache = RadixCache(SIZE)
    for blocks in ((1,), (2,)):
        cache.unlock(insert(cache, blocks))
    cache.match((1,), 1, 0)
    cache.evict(1)
    assert cache.match((1,), 1, 0)[1] == 1 and cache.match((2,), 1, 0)[1] == 0


def test_blocks_remember_which_weights_made_them() -> None:
    cache = RadixCache(SIZE)
    cache.unlock(insert(cache, (1, 2), epoch=0))
    cache.unlock(insert(cache, (1, 2, 3), epoch=1))
    assert cache.match((1, 2, 3), 3, 1)[1:] == (3, 2)
    assert cache.match((1, 2, 3), 3, 0)[1:] == (3, 1)


def test_clear_forgets_everything() -> None:
    cache = RadixCache(SIZE)
    cache.unlock(insert(cache, (1, 2)))
    cache.clear()
    assert (cache.total_tokens, cache.evictable_tokens, cache.match((1, 2), 2, 0)[1]) == (0, 0, 0)
    assert cache.evict(SIZE) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("insert", "unlock", "evict")), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 5)
        ),
        max_size=60,
    )
)
def test_counts_agree_with_a_walk_of_the_tree_whatever_happens(steps: list[tuple[str, list[int], int]]) -> None:
    cache = RadixCache(SIZE)
    held: list[tuple[Block, tuple[int, ...]]] = []
    for name, blocks, number in steps:
        if name == "insert":
            held.append((insert(cache, tuple(blocks)), tuple(blocks)))
        elif name == "unlock" and held:
            cache.unlock(held.pop(number % len(held))[0])
        elif name == "evict":
            wanted, before = number * SIZE, cache.evictable_tokens
            assert cache.evict(wanted) == min(wanted, before)  # every unlocked block can be reached, leaf by leaf
        total, unlocked = _walk(cache.root)
        assert (cache.total_tokens, cache.evictable_tokens) == (total * SIZE, unlocked * SIZE)
        for _, prefix in held:
            assert cache.match(prefix, len(prefix), 0)[1] == len(prefix)


def _walk(node: Block) -> tuple[int, int]:
    total = unlocked = 0
    for child in (node.children or {}).values():
        below = _walk(child)
        total += 1 + below[0]
        unlocked += (child.locks == 0) + below[1]
    return total, unlocked
