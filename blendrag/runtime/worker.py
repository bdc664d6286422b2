"""The worker vLLM runs (`worker_cls`): its own for this platform, plus the hand-over of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.platforms import current_platform

from blendrag.profile import default_policy
from blendrag.runtime.connector import BlendConnector
from blendrag.runtime.engine.failure import leave_notes
from blendrag.runtime.model.blend_model import BlendModel
from blendrag.runtime.passes.blender import Blender
from blendrag.runtime.passes.device_tier import DeviceTier
from blendrag.runtime.passes.encoder import Encoder
from blendrag.runtime.passes.entries import Entries
from blendrag.runtime.passes.forward import Forward
from blendrag.runtime.passes.probe import settle_rotations

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
    """vLLM's worker; gives the connector the model once it is loaded."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        leave_notes(str(vllm_config.kv_transfer_config.engine_id))
        super().__init__(vllm_config, *args, **kwargs)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocates the paged cache, then attaches blending.

        Raises:
            ModelError: the model cannot be blended.
        """
        super().initialize_from_config(kv_cache_config)
        connector = get_kv_transfer_group()
        assert isinstance(connector, BlendConnector)
        model = BlendModel(self.model_runner.get_model(), self.vllm_config, kv_cache_config)
        settle_rotations(model)
        config = connector.config
        tier = DeviceTier(model.device, config.gpu_bytes) if model.device.type == "cuda" else None
        entries = Entries(connector.store, config.namespace, model.fingerprint, tier)
        policy, _ = default_policy(config, entries.fingerprint)
        self._identity = {"fingerprint": entries.fingerprint, "policy": policy.settings()}
        forward = Forward(model)
        self._encoder: Encoder | None = Encoder(model, forward, entries)
        connector.attach(Blender(model, forward, entries, config.sparse_attention), self._encoder)

    def blendrag_encode(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int],
                        neutral: bool) -> list[tuple[str, bool]]:
        """`Encoder.encode`, for `collective_rpc`."""
        assert self._encoder is not None
        return self._encoder.encode(chunks, prefix_ids, neutral)

    def blendrag_forget(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], neutral: bool) -> int:
        """`Encoder.forget`, for `collective_rpc`."""
        assert self._encoder is not None
        return self._encoder.forget(chunks, prefix_ids, neutral)

    def blendrag_stored(self, chunks: Sequence[Sequence[int]], prefix_ids: Sequence[int], neutral: bool) -> list[bool]:
        """`Encoder.stored`, for `collective_rpc`."""
        assert self._encoder is not None
        return self._encoder.stored(chunks, prefix_ids, neutral)

    def blendrag_identity(self) -> dict[str, Any]:
        """The model's fingerprint, and `Policy.settings()` of requests that name no policy."""
        return self._identity

    def blendrag_quality(self) -> list[dict[str, Any]]:
        """What the quality guard knows: `Quality` of each policy, as mappings."""
        return list(get_kv_transfer_group().quality)

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
