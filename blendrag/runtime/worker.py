"""The worker vLLM runs (`worker_cls`): its own for this platform, plus the hand-over of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from blake3 import blake3
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from blendrag.profile import default_policy
from blendrag.runtime.compat import WEIGHT_CHANGES, before_weight_processing, extension_methods
from blendrag.runtime.connector import BlendConnector
from blendrag.runtime.engine.connectors import check_connector
from blendrag.runtime.engine.failure import leave_notes
from blendrag.runtime.fingerprint import Fingerprint
from blendrag.runtime.messages import BlendMetadata
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.model.weights import LoadedWeights, state_digest
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.runtime.passes.encoder import Encoder
from blendrag.runtime.passes.entries import Entries
from blendrag.runtime.passes.forward import Forward
from blendrag.runtime.passes.graphs import Graphs, capture_for_passes
from blendrag.runtime.passes.measuring import measure, warm_up
from blendrag.runtime.passes.paged_reader import paged_reader
from blendrag.runtime.passes.probe import settle_rotations
from blendrag.runtime.passes.trial_steps import TrialSteps

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def _platform_worker() -> Any:
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


class BlendWorker(_platform_worker()):  # type: ignore[misc]
    """vLLM's worker; gives the connector the model once it is loaded.

    Where the model's weights are changed, entries are named after another fingerprint from then on.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        check_connector(vllm_config)
        leave_notes(str(vllm_config.kv_transfer_config.engine_id))
        capture_for_passes(vllm_config)
        super().__init__(vllm_config, *args, **kwargs)
        self._graphs = Graphs()
        self._weights = LoadedWeights()
        self._fingerprint: Fingerprint | None = None
        self._asleep_without_weights = False
        for name in extension_methods(vllm_config):
            setattr(self, name, self._watched(getattr(self, name)))

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and digests its weights on the way."""
        with self._changing_weights(), before_weight_processing(self._weights.take):
            super().load_model(*args, **kwargs)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the paged cache, then attaches blending.

        Raises:
            ModelError: the model cannot be blended.
        """
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group()
        assert isinstance(connector, BlendConnector)  # `check_connector` has seen to it
        model = BlendModel(self.model_runner.get_model(), self.vllm_config, kv_cache_config, self._weights)
        settle_rotations(model)
        config = connector.config
        tier = DeviceTier(model.device, config.gpu_bytes) if model.device.type == "cuda" else None
        entries = Entries(connector.store, model.fingerprint, tier, model.form)
        policy, _ = default_policy(config, entries.fingerprint)
        self._policy = policy.settings()
        forward = Forward(model, graphs=self._graphs)
        self._encoder: Encoder | None = Encoder(model, forward, entries)
        reader = paged_reader(model, kv_cache_config)
        if not all(entries.ranks.agree([reader is not None])):
            reader = None
        connector.attach(Blender(model, forward, entries, config.sparse_attention, reader), self._encoder)
        self._fingerprint = connector.fingerprint
        self._unique = entries.ranks.common(uuid4().hex)  # the same on all ranks

    def compile_or_warm_up_model(self) -> Any:
        """Compiles and captures what vLLM does; then measures what prefills and passes take, or tries passes out."""
        with self._graphs.recording(self.model_runner.get_model()):
            times = super().compile_or_warm_up_model()
        connector = get_kv_transfer_group()
        steps = TrialSteps(self, BlendMetadata(generation=connector.fingerprint.generation))
        if connector.config.blend == "auto":
            connector.worker.costs = measure(connector.worker.blender, steps, connector.config)
        elif not current_platform.is_cpu():
            warm_up(connector.worker.blender, steps, connector.config)
        return times

    def sleep(self, level: int = 1) -> None:
        """Frees memory; at level 2 the weights are lost, and whoever wakes the engine up loads some."""
        self._asleep_without_weights |= level > 1
        super().sleep(level)

    def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Allocates the memory again."""
        super().wake_up(*args, **kwargs)
        if self._asleep_without_weights:
            self._asleep_without_weights = False
            self._leave_weights()

    def apply_model(self, fn: Callable[[Any], Any]) -> Any:
        """What `fn` returns for the model, which it may change."""
        return self._watched(super().apply_model)(fn)

    @contextmanager
    def _changing_weights(self) -> Iterator[None]:
        """Within it weights change, also where it fails."""
        try:
            yield
        finally:
            self._leave_weights()

    def _leave_weights(self) -> None:
        """Names entries after a fingerprint that no engine ever had.

        vLLM processes the new weights layer by layer while it loads them: they are at no time together as they were
        when the engine started, so it cannot be told whether another engine has the same.
        """
        if self._fingerprint is not None:
            self._unique = blake3(self._unique.encode()).hexdigest()
            self._fingerprint.change(model=self._unique)

    def _watched(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that may or may not change weights."""
        @wraps(method)
        def watch(*args: Any, **kwargs: Any) -> Any:
            if self._fingerprint is None:
                return method(*args, **kwargs)
            before = state_digest(self.model_runner.get_model())
            try:
                return method(*args, **kwargs)
            finally:
                if before is None or state_digest(self.model_runner.get_model()) != before:
                    self._leave_weights()
        return watch

    def blendrag_encode(self, scope: str, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
                        neutral: bool) -> list[tuple[str, bool]]:
        """`Encoder.encode`, for `collective_rpc`."""
        assert self._encoder is not None
        return self._encoder.encode(scope, chunks, prefix_ids, neutral)

    def blendrag_forget(self, scope: str, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
                        neutral: bool) -> int:
        """`Encoder.forget`, for `collective_rpc`."""
        assert self._encoder is not None
        return self._encoder.forget(scope, chunks, prefix_ids, neutral)

    def blendrag_stored(self, scope: str, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
                        neutral: bool) -> list[bool]:
        """`Encoder.stored`, for `collective_rpc`."""
        assert self._encoder is not None
        return self._encoder.stored(scope, chunks, prefix_ids, neutral)

    def blendrag_identity(self) -> dict[str, Any]:
        """The model's fingerprint, and `Policy.settings()` of requests that name no policy."""
        return {"fingerprint": get_kv_transfer_group().fingerprint.value, "policy": self._policy}

    def blendrag_quality(self) -> list[dict[str, Any]]:
        """What the quality guard knows: `Quality` of each policy, as mappings."""
        return list(get_kv_transfer_group().worker.quality)

    def blendrag_call(self, method: str, args: Sequence[Any]) -> tuple[Any, tuple[str, str] | None]:
        """What another method returns and None, or None and the class and text of the exception it raised.

        vLLM tells other processes an exception's text alone.
        """
        try:
            return getattr(self, method)(*args), None
        except Exception as error:
            return None, (type(error).__name__, str(error))

    def shutdown(self) -> None:
        """Lets go of the model before vLLM does."""
        self._encoder = None
        super().shutdown()


def _changing(name: str) -> Callable[..., Any]:
    """vLLM's method of that name, after which the model may have other weights."""
    changes = getattr(BlendWorker, name)

    @wraps(changes)
    def change(self: BlendWorker, *args: Any, **kwargs: Any) -> Any:
        with self._changing_weights():
            return changes(self, *args, **kwargs)
    return change


for _name in WEIGHT_CHANGES:
    if hasattr(BlendWorker, _name):
        setattr(BlendWorker, _name, _changing(_name))
