"""What a store tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreStats:
    """A store's contents now, and what happened since this process opened it.

    Attributes:
        entries: entries in any tier.
        ram_entries, ram_bytes: what the RAM tier holds.
        disk_entries, disk_bytes: what the disk tier holds, all processes' entries, as file sizes.
        hits_ram, hits_disk, misses: outcomes of `get`.
        damaged: entries dropped because their file was damaged or missing.
        evicted: entries that left the RAM tier to make room.
        disk_evicted: entries that left the disk tier to make room, by this process's doing.
    """

    entries: int
    ram_entries: int
    ram_bytes: int
    disk_entries: int
    disk_bytes: int
    hits_ram: int
    hits_disk: int
    misses: int
    damaged: int
    evicted: int
    disk_evicted: int
