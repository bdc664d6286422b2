"""Where the KV of chunks is kept: host RAM, and a folder that outlives the process."""

from blendrag.store.chunk_store import ChunkStore
from blendrag.store.entry import KVEntry
from blendrag.store.index import Match
from blendrag.store.keys import PrefixHasher, entry_key, prefix_digest
from blendrag.store.registry import open_store
from blendrag.store.stats import StoreStats

__all__ = ["ChunkStore", "KVEntry", "Match", "PrefixHasher", "StoreStats", "entry_key", "open_store", "prefix_digest"]
