"""The prefix cache of one engine: a tree of prompt blocks with locks, LRU eviction and version tags.

Source of the behaviour: SGLang's radix cache, at block granularity (issue 2, point 5). A block is known by an id (the
`hash_ids` of Mooncake traces); its text is never needed. Each block remembers which weights computed it, so that a hit
across a weight change can be told from a clean one.
"""

from __future__ import annotations

from heapq import heappop, heappush


class Block:
    """One cached block. ``locks`` counts the running requests whose prefix goes through it."""

    __slots__ = ("children", "epoch", "key", "locks", "parent", "used_at")

    def __init__(self, key: int, parent: Block | None, epoch: int, used_at: int) -> None:
        self.key = key
        self.parent = parent
        self.epoch = epoch
        self.used_at = used_at
        self.locks = 0
        self.children: dict[int, Block] | None = None


class RadixCache:
    """Prompt blocks of ``block_tokens`` tokens each, shared by requests that begin alike.

    The cache counts tokens; the memory itself is the scheduler's. ``total_tokens`` is what the tree holds,
    ``evictable_tokens`` the part that no running request uses.

    Args:
        block_tokens: tokens of one block (512 in Mooncake traces).
    """

    __slots__ = ("_clock", "_leaves", "_pushes", "block_tokens", "evictable_tokens", "root", "total_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.root = Block(0, None, 0, 0)
        self.total_tokens = 0
        self.evictable_tokens = 0
        self._clock = 0
        self._pushes = 0  # tie-break of the heap, so that blocks are never compared
        self._leaves: list[tuple[int, int, Block]] = []

    def match(self, blocks: tuple[int, ...], limit: int, epoch: int) -> tuple[Block, int, int]:
        """The longest cached prefix of at most ``limit`` blocks, marked as just used.

        Returns:
            (deepest block, number of blocks hit, how many of them were computed by other weights than ``epoch``).
        """
        self._clock += 1
        node, hits, stale = self.root, 0, 0
        for index in range(limit):
            children = node.children
            child = children.get(blocks[index]) if children is not None else None
            if child is None:
                break
            child.used_at = self._clock
            stale += child.epoch != epoch
            hits += 1
            node = child
        return node, hits, stale

    def lock(self, node: Block) -> None:
        """Protect ``node`` and its ancestors from eviction, once more."""
        walk: Block | None = node
        while walk is not None and walk.parent is not None:
            if walk.locks == 0:
                self.evictable_tokens -= self.block_tokens
            walk.locks += 1
            walk = walk.parent

    def unlock(self, node: Block) -> None:
        """Take one lock back from ``node`` and its ancestors; unlocked blocks stay until memory is needed."""
        walk: Block | None = node
        while walk is not None and walk.parent is not None:
            walk.locks -= 1
            if walk.locks == 0:
                self.evictable_tokens += self.block_tokens
                if not walk.children:
                    self._offer(walk)
            walk = walk.parent

    def extend(self, node: Block, blocks: tuple[int, ...], start: int, stop: int, epoch: int) -> tuple[Block, int]:
        """Insert ``blocks[start:stop]`` below ``node`` (which the caller has locked) and lock them for the caller.

        Returns:
            (deepest block, how many blocks were there already: the caller's own copies of those are surplus).
        """
        self._clock += 1
        shared = 0
        size = self.block_tokens
        for index in range(start, stop):
            children = node.children
            if children is None:
                children = node.children = {}
            key = blocks[index]
            child = children.get(key)
            if child is None:
                child = children[key] = Block(key, node, epoch, self._clock)
                self.total_tokens += size
            else:
                shared += 1
                child.used_at = self._clock
                if child.locks == 0:
                    self.evictable_tokens -= size
            child.locks += 1
            node = child
        return node, shared

    def evict(self, tokens: int) -> int:
        """Drop least recently used unlocked leaves until ``tokens`` are freed or none is left. Returns tokens freed."""
        freed = 0
        size = self.block_tokens
        leaves = self._leaves
        while freed < tokens and leaves:
            used_at, _, node = heappop(leaves)
            parent = node.parent
            if parent is None or node.locks or node.children:
                continue  # gone, in use again, or no longer a leaf: offered anew when that ends
            if node.used_at != used_at:
                self._offer(node)
                continue
            assert parent.children is not None
            del parent.children[node.key]
            node.parent = None
            freed += size
            if parent.parent is not None and not parent.locks and not parent.children:
                self._offer(parent)
        self.total_tokens -= freed
        self.evictable_tokens -= freed
        return freed

    def clear(self) -> None:
        """Forget everything (flush). The caller makes sure that nothing is locked."""
        self.root = Block(0, None, 0, 0)
        self.total_tokens = 0
        self.evictable_tokens = 0
        self._leaves = []

    def _offer(self, node: Block) -> None:
        self._pushes += 1
        heappush(self._leaves, (node.used_at, self._pushes, node))
