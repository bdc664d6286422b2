"""An order of chunks in which prompts that share some of them begin alike."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from blendrag.prompt import BlendPrompt, Chunk

_MOST_NODES = 20_000


@dataclass
class _Node:
    """Chunks sent in this order: the path from the root. `asked` is when a prompt last took it."""

    children: dict[str, _Node] = field(default_factory=dict)
    visits: int = 0
    asked: int = 0


class ChunkOrder:
    """Remembers the orders of earlier prompts and continues them.  Safe to call from several threads.

    A prompt's chunks follow the path that most prompts took before, as long as it leads over chunks of its own; the
    others come behind, in the order in which they were given.  So vLLM's prefix cache holds the longest beginning
    that it can: the idea of ContextPilot (MLSys 2026), without its index.
    """

    def __init__(self, most_nodes: int = _MOST_NODES) -> None:
        self._roots: dict[str, _Node] = {}
        self._most_nodes = most_nodes
        self._nodes = 0
        self._clock = itertools.count(1)
        self._lock = threading.Lock()

    def arrange(self, prompt: BlendPrompt) -> BlendPrompt:
        """The prompt with its chunks in the order that suits the prefix cache; the text between them stays."""
        left = prompt.chunks
        if len(left) < 2:
            return prompt
        with self._lock:
            ordered = self._walk(prompt.prefix, left)
            self._forget()
        texts: Iterator[str] = iter(ordered)
        parts = [Chunk(next(texts)) if isinstance(part, Chunk) else part for part in prompt.parts]
        return BlendPrompt(*parts, add_special_tokens=prompt.add_special_tokens)

    def _walk(self, prefix: str, left: list[str]) -> list[str]:
        now, ordered = next(self._clock), []
        node = self._roots.setdefault(prefix, _Node())
        node.asked = now
        while left:
            known = [text for text in left if text in node.children]
            text = max(known, key=lambda text: node.children[text].visits) if known else left[0]
            if text not in node.children:
                node.children[text] = _Node()
                self._nodes += 1
            node = node.children[text]
            node.visits, node.asked = node.visits + 1, now
            left.remove(text)
            ordered.append(text)
        return ordered

    def _forget(self) -> None:
        """Drops the half of the paths that was asked for least recently, once there are too many."""
        if self._nodes <= self._most_nodes:
            return
        ages = sorted(node.asked for root in self._roots.values() for node in _all(root))
        oldest = ages[len(ages) // 2]
        self._roots = {prefix: root for prefix, root in self._roots.items() if root.asked > oldest}
        self._nodes = sum(_prune(root, oldest) for root in self._roots.values())


def _all(node: _Node) -> Iterator[_Node]:
    for child in node.children.values():
        yield child
        yield from _all(child)


def _prune(node: _Node, oldest: int) -> int:
    """Drops what was last asked for at `oldest` or before; returns how many nodes are left below.

    A path is at least as recent as what follows on it.
    """
    node.children = {text: child for text, child in node.children.items() if child.asked > oldest}
    return sum(1 + _prune(child, oldest) for child in node.children.values())
