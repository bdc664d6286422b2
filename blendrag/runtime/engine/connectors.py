"""Which KV connectors and workers go together; what does not is refused before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blendrag.errors import ModelError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR = {"kv_connector": "BlendConnector", "kv_connector_module_path": "blendrag.runtime.connector",
             "kv_role": "kv_both"}
WORKER = "blendrag.runtime.worker.BlendWorker"

NO_OFFLOADING = ("vLLM's KV offloading does not work beside blending, as it would store blended KV under the names of "
                 "exact KV: leave {option} out, and give chunks the memory (ram_bytes, disk_bytes)")

_REMEDY = "name BlendConnector alone in --kv-transfer-config, as blendrag's README shows"


def check_connector(vllm_config: VllmConfig) -> None:
    """Of an engine that runs `BlendWorker`s.

    Raises:
        ModelError: it has another connector than `BlendConnector`, or others beside it.
    """
    transfer = vllm_config.kv_transfer_config
    name = transfer.kv_connector if transfer is not None else None
    if transfer is None or name is None:
        raise ModelError(f"{WORKER} runs without its KV connector: {_REMEDY}, or leave --worker-cls out")
    if (name, transfer.kv_connector_module_path) == (CONNECTOR["kv_connector"], CONNECTOR["kv_connector_module_path"]):
        return
    if name == "MultiConnector":
        raise ModelError("blending does not work beside another KV connector, which would store blended KV under the "
                         f"names of exact KV and give it to other requests: {_REMEDY}, without MultiConnector")
    raise ModelError(f"{WORKER} does not work with the KV connector {name} (offloading options choose one, too): "
                     f"{_REMEDY}, without such options, or leave --worker-cls out")


def check_worker(vllm_config: VllmConfig) -> None:
    """Of an engine that has a `BlendConnector`.

    Raises:
        ModelError: its workers do not hand the model to the connector.
    """
    name = vllm_config.parallel_config.worker_cls
    if name == WORKER:
        return
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from blendrag.runtime.worker import BlendWorker

    kind = resolve_obj_by_qualname(name) if isinstance(name, str) and "." in name else name
    if not (isinstance(kind, type) and issubclass(kind, BlendWorker)):
        raise ModelError(f"BlendConnector does not work with the worker {name}: set --worker-cls {WORKER}")
