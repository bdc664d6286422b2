"""Measures at start-up what vLLM's own prefill and our passes cost on this machine.

vLLM's prefill is timed in steps of its own (`TrialSteps`), blending in whole passes over made-up entries, so that all
of what a request will run is in the figures.  Each shape is small: two sizes make a line.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from blendrag.config import BlendConfig
from blendrag.policies import Attention, NoRecompute, Policy, Query
from blendrag.runtime.costs import Costs, PassWork, Scoring
from blendrag.runtime.messages import BlendJob, BlendReport, Placement
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.context import Context
from blendrag.runtime.passes.entries import Entries
from blendrag.runtime.passes.lanes import BlendLane
from blendrag.runtime.passes.pass_queue import PassQueue
from blendrag.runtime.passes.trial_steps import TrialSteps
from blendrag.store import KVEntry

logger = logging.getLogger(__name__)

_FEW, _MANY = 16, 2048
"""Rows of a small and of a large forward, at least and at most."""
_CONTEXT = {"cpu": 512, "cuda": 8192}
"""Tokens of stored KV that are placed.  Of fewer a GPU shows how long launches take, whatever they launch."""
_FAR = {"cpu": 4096, "cuda": 16384}
"""Tokens of a context that is only attended to."""
_MARGIN = {"cpu": 0.9, "cuda": 1.1}
"""See `Costs.margin`.  Estimates of passes were up to 15 % low on CPUs; on an H200 (the shape of an 8B model) they were
5 to 40 % high, and those of full prefills of up to 8,192 tokens 10 to 35 % low."""
_ENTRY, _PIECE = 512, 64
_FORWARD_S = 0.3
"""A large forward takes about as long, so that slow machines measure small ones."""
_ROUNDS = 5
_BUDGET_S = 1.5
"""No third round begins when so much time is spent, no second one after twice as much."""
_LIMIT_S = 10.0
"""Nothing is learnt from a machine that needs longer for one round: others keep it busy."""
_ALL_ROWS = 2**60
_ENTRY_BYTES = 128 * 2**20
_READ_BYTES = 8 * 2**20


def measure(blender: Blender, steps: TrialSteps, config: BlendConfig) -> Costs | None:
    """The costs on this machine; None, with a line in the log, where they cannot be measured.

    All tensor-parallel ranks call it together.  Their figures differ a little; those of the first count.
    """
    started = time.perf_counter()
    try:
        costs = _Measuring(blender, steps, config).costs()
        logger.debug("measured in %.2f s: %s", time.perf_counter() - started, costs)
        return costs
    except Exception as error:
        logger.warning("what a blend pass costs could not be measured (%s: %s): whatever is stored is blended",
                       type(error).__name__, error)
        logger.debug("measuring failed", exc_info=True)
        return None


def warm_up(blender: Blender, steps: TrialSteps, config: BlendConfig) -> None:
    """Runs passes of the default policy over made-up entries: Triton compiles each kernel when it first runs.

    Otherwise the first requests, and all their neighbours, would wait for seconds.
    """
    try:
        _Measuring(blender, steps, config).warm_up()
    except Exception as error:
        logger.warning("passes could not be tried out (%s: %s): the first requests wait for kernels to be compiled",
                       type(error).__name__, error)
        logger.debug("warming up failed", exc_info=True)


class _MadeUp(Entries):
    """Entries of random numbers, which no store holds: keys are their numbers."""

    def __init__(self, real: Entries, entries: Sequence[KVEntry]) -> None:
        self.ranks = real.ranks
        self.fingerprint = real.fingerprint
        self.tier = real.tier
        self._entries = entries

    def load(self, keys: Sequence[str], tokens: Sequence[int] | None = None) -> list[KVEntry | None]:
        return [self._entries[int(key)] for key in keys]

    def ready(self, requests: Mapping[str, Mapping[str, int]], wait_s: float = 0) -> list[bool]:
        return [True] * len(requests)

    def release(self, request_id: str) -> None:
        """Nothing was read for it."""


@dataclass
class _Figures:
    """The quickest of several runs, by name of what was run; seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, name: str, seconds: float) -> None:
        self.seconds[name] = min(seconds, self.seconds.get(name, float("inf")))

    def __getitem__(self, name: str) -> float:
        return self.seconds[name]


class _Measuring:
    """One measurement; see `measure`."""

    def __init__(self, blender: Blender, steps: TrialSteps, config: BlendConfig) -> None:
        self.steps, self.config = steps, config
        self.model, self.forward = blender.model, blender.forward
        self.ranks = blender.entries.ranks
        self.max_rows = blender.forward.max_rows
        self.few = max(1, min(_FEW, self.max_rows // 2, steps.max_tokens // 8))
        self.context = max(1, min(_CONTEXT[self.model.device.type], steps.max_tokens // 2))
        self.blender = Blender(self.model, blender.forward, _MadeUp(blender.entries, self._entries()))
        self.figures = _Figures()

    def warm_up(self) -> None:
        """One pass of each kind."""
        shapes = self._shapes(self.few, 4 * self.few, self.few)
        for name in ("pass few", "pass stored", "query", "query pieces"):
            shapes[name]()
        self._synchronize()

    def costs(self) -> Costs:
        self.steps.run(self.few)
        self._pass(self.few + 1, [], NoRecompute())
        quick = max(self.steps.run(self.few) - self.steps.run(1) / 2, 1e-6)
        # All ranks must run the same shapes.
        many = int(self.ranks.leading(_FORWARD_S * self.few / quick))
        many = min(_MANY, self.max_rows, self.steps.max_tokens, max(4 * self.few, many))
        few = self.few = max(self.few, min(many // 8, self.steps.max_tokens // 8))
        far = min(_FAR[self.model.device.type], self.steps.max_tokens - few)
        shapes = self._shapes(few, many, far)
        if self.model.device.type == "cuda":  # Triton compiles each kernel when it first runs
            for run in shapes.values():
                run()
        started = time.perf_counter()
        for number in range(_ROUNDS):
            budget = _BUDGET_S if number > 1 else 2 * _BUDGET_S
            if number and self.ranks.leading(time.perf_counter() - started) > budget:
                break
            for name, run in shapes.items():
                self._synchronize()
                self.figures.note(name, run())
                if self.ranks.leading(time.perf_counter() - started) > _LIMIT_S:
                    raise TimeoutError(f"it takes more than {_LIMIT_S:.0f} s")
        return self._solve(few, many, far, self._disk())

    def _shapes(self, few: int, many: int, far: int) -> dict[str, Callable[[], float]]:
        stored, tokens = self._placements(_ENTRY), self.context + few
        return {
            "vllm one": lambda: self.steps.run(1),
            "pass one": lambda: self._pass(2, [], NoRecompute()),
            "vllm few": lambda: self.steps.run(few),
            "pass few": lambda: self._pass(few + 1, [], NoRecompute()),
            "vllm many": lambda: self.steps.run(many),
            "pass many": lambda: self._pass(many + 1, [], NoRecompute()),
            "vllm far": lambda: self.steps.run(few, far),
            "pass far": lambda: self._far(few, far),
            "pass stored": lambda: self._pass(self.context, stored, NoRecompute()),
            "query": lambda: self._query(tokens, stored),
            "query pieces": lambda: self._pass(tokens, self._placements(_PIECE), Query()),
        }

    def _query(self, tokens: int, placements: list[Placement]) -> float:
        started = time.perf_counter()
        report = self._report(tokens, placements, Query())
        self.figures.note("score", report.score_s)
        return time.perf_counter() - started

    def _pass(self, tokens: int, placements: list[Placement], policy: Policy) -> float:
        started = time.perf_counter()
        self._report(tokens, placements, policy)
        return time.perf_counter() - started

    def _far(self, rows: int, before: int) -> float:
        """A forward over few rows at the end of a long context, of which nothing was placed or is written."""
        started = time.perf_counter()
        context = Context(self.model, before + rows, ())
        mask = torch.zeros_like(context.stored)
        mask[before:] = True
        self.forward.run([BlendLane(context, torch.zeros(before + rows, dtype=torch.int64, device=self.model.device),
                                    mask, 0, ())])
        self._synchronize()
        return time.perf_counter() - started

    def _report(self, tokens: int, placements: list[Placement], policy: Policy) -> BlendReport:
        ids = np.arange(tokens - 1 if not placements else tokens, dtype=np.int64) * 101 % 256
        start = placements[-1].end if placements else 0
        queue = PassQueue(self.blender)
        queue.add([BlendJob("trial", ids, placements, min(start, len(ids) - 1), policy, 0,
                            self.steps.block_ids(tokens), fingerprint=self.blender.entries.fingerprint)])
        [report] = queue.advance(_ALL_ROWS).values()
        if report.failure:
            raise RuntimeError(report.failure)
        return report

    def _entries(self) -> list[KVEntry]:
        """Random KV for the context, in host memory; the same over and over where it would take much of that."""
        attention = self.model.layers[0].attention
        shape = (len(self.model.layers), _ENTRY, attention.num_kv_heads, attention.head_size)
        size = 2 * self.model.dtype.itemsize * int(np.prod(shape))
        self._count = max(1, min(-(-self.context // _ENTRY), _ENTRY_BYTES // size))
        source = torch.Generator().manual_seed(0)  # the engine's own numbers stay as they are
        pin = self.model.device.type == "cuda"
        return [KVEntry(*(torch.empty(shape, dtype=self.model.dtype, pin_memory=pin).normal_(generator=source)
                          for _ in range(2))) for _ in range(self._count)]

    def _placements(self, length: int) -> list[Placement]:
        """The context, all of it stored in chunks of a length."""
        entries = self._count
        return [Placement(start, min(start + length, self.context), str(start // _ENTRY % entries), False,
                          start % _ENTRY) for start in range(0, self.context, length)]

    def _solve(self, few: int, many: int, far: int, disk: float) -> Costs:
        t, context = self.figures, self.context
        vllm_pair = max(0.0, t["vllm far"] - t["vllm few"]) / (few * far)
        pass_pair = max(0.0, t["pass far"] - t["pass few"]) / (few * far)
        squares = (many**2 - few**2) / 2
        row = max(0.0, t["vllm many"] - t["vllm few"] - vllm_pair * squares) / (many - few)
        pass_row = max(row, (t["pass many"] - t["pass few"] - pass_pair * squares) / (many - few))
        costs = Costs(
            vllm_floor=t["vllm one"], vllm_step=t["vllm few"] - few * row, row=row, vllm_pair=vllm_pair,
            pass_floor=t["pass one"], pass_step=t["pass few"] - few * pass_row, pass_row=pass_row,
            pass_pair=pass_pair, weigh=0.0, place=max(0.0, t["pass stored"] - t["pass one"]) / context, piece=0.0,
            drift=0.0, again=float(self.model.device.type != "cpu"), disk=disk, step_tokens=float(self.max_rows),
            margin=_MARGIN[self.model.device.type])
        # What the rest takes is seen in a pass of the default policy.
        layers = len(self.model.layers)
        [evidence] = Query().evidence(layers)
        assert isinstance(evidence, Attention)
        weighed = few * (context + few) * len(evidence.layers) / layers
        scoring = Scoring(few, (evidence.layers[-1] + 1) / layers)
        recomputed = Query().recomputed([context], layers)
        pairs = recomputed * context / 2 + few * (context + few / 2)
        work = PassWork(context + few, few, recomputed, placements=1, pairs=pairs, scoring=(scoring,))
        last = costs.prefill(1, work.tokens - 1)
        costs = replace(costs, weigh=max(0.0, t["score"] - costs.scoring(work)) / weighed)
        scored = replace(work, scoring=(replace(scoring, weighed=weighed),))
        costs = replace(costs, drift=max(0.0, t["query"] + last - costs.blend(scored)) / context)
        more = -(-context // _PIECE) - -(-context // _ENTRY)
        return replace(costs, piece=max(0.0, t["query pieces"] - t["query"]) / more if more else 0.0)

    def _disk(self) -> float:
        """Seconds to read one token's KV from where the disk tier is, checksum included; 0 without one."""
        if self.config.store_path is None:
            return 0.0
        data = bytes(_READ_BYTES)
        folder = self.config.store_path
        try:
            with TemporaryFile(dir=folder) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from memory
                started = time.perf_counter()
                file.seek(0)
                blake3(file.read()).digest()
        except OSError:  # a read-only volume
            started = time.perf_counter()
            blake3(bytearray(data)).digest()
        attention: Any = self.model.layers[0].attention
        each = 2 * len(self.model.layers) * attention.num_kv_heads * attention.head_size * self.model.dtype.itemsize
        return (time.perf_counter() - started) * float(each) / _READ_BYTES

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
