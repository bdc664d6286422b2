"""`BlendIngestion`: the last step of an ingestion pipeline, which computes the KV of its nodes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import BaseNode, MetadataMode, TransformComponent
from llama_index.core.storage.docstore import BaseDocumentStore
from tqdm.auto import tqdm  # type: ignore[import-untyped]

from blendrag import BlendConfig, BlendEngine
from blendrag.adapters import forget_chunks, store_chunks
from blendrag.errors import ConfigError, StoreError
from llama_index.ingestion.blendrag.ledger import Ledger
from llama_index.llms.blendrag import BlendLLM

_log = logging.getLogger(__name__)

# Without a store_path the KV goes with its engine, and so does what is known of it.
_in_memory: WeakKeyDictionary[BlendEngine, Ledger] = WeakKeyDictionary()


class BlendIngestion(TransformComponent):
    """Computes and stores the KV of each node's text, as the model will read it: metadata included, stripped.

    Place it last, when the texts are final.  It passes the nodes on unchanged, computes what is not stored yet, and
    fails no pipeline: what cannot be stored is told in the log, and computed in prompts as ever.

    **Updates and deletions.**  It notes which chunk came from which document.  When a changed document passes through
    again, the KV of chunks that it lost is deleted; with `docstore`, so is that of documents that the docstore no
    longer has, whichever strategy removed them; and `delete` does it for single documents.  A chunk that another
    document holds too stays.

    **Cache.**  A pipeline skips its steps for input that it knows.  The key of its cache holds this step's model and
    settings, and changes when KV was deleted, when a document is gone from the docstore, or when the store is another
    one; so what is needed again is computed again.  KV that made room for other KV (`ram_bytes`, `disk_bytes`) is not
    noticed: call `ingestion(nodes)`, which looks for itself, or set `populate="on_miss"`.

    **Several workers.**  The engine is in this process, and worker processes must not start one of their own: a
    pipeline with this step refuses `num_workers`.  Leave the step out of the pipeline and call it on the result,
    `ingestion(pipeline.run(documents=documents, num_workers=4))`.

    Example:
        >>> docstore = SimpleDocumentStore()
        >>> pipeline = IngestionPipeline(
        ...     transformations=[SentenceSplitter(), embed_model, BlendIngestion(llm, docstore=docstore)],
        ...     docstore=docstore, vector_store=vector_store, docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE)
        >>> pipeline.run(documents=documents)

    Args:
        llm: the `BlendLLM` that will answer; it brings its model, config, engine arguments, and its engine.
        docstore: the pipeline's or the index's, whose deletions it follows.
        collection: name of the documents that this pipeline ingests.  Pipelines with different docstores and the same
            `store_path` and namespace need different names, or each deletes the KV of the other's documents.
    """

    model: str = Field(description="Name or folder of the model.")
    config: BlendConfig = Field(description="Blending and the chunk store.")
    engine_args: dict[str, Any] = Field(description="Further engine arguments of vLLM's.")
    collection: str = Field(default="default", description="Name of the documents that this pipeline ingests.")

    _llm: BlendLLM = PrivateAttr()
    _docstore: BaseDocumentStore | None = PrivateAttr(default=None)
    _on_disk: Ledger | None = PrivateAttr(default=None)

    def __init__(self, llm: LLM | None = None, *, docstore: BaseDocumentStore | None = None,
                 collection: str = "default", **fields: Any) -> None:
        if llm is None:
            if "model" not in fields:
                raise ConfigError("BlendIngestion needs the model that will answer: pass llm=BlendLLM(...)")
            llm = BlendLLM(**{name: fields[name] for name in ("model", "config", "engine_args") if name in fields})
        if not isinstance(llm, BlendLLM):
            raise ConfigError(f"{type(llm).__name__} has no KV to store: pass llm=BlendLLM(...)")
        own = {"model": llm.model, "config": llm.config, "engine_args": llm.engine_args, "collection": collection}
        super().__init__(**own)
        self._llm = llm
        self._docstore = docstore

    @classmethod
    def class_name(cls) -> str:
        """Name under which LlamaIndex serialises it."""
        return "BlendIngestion"

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Its settings, and what the pipeline's cache must not outlive."""
        return super().to_dict(**kwargs) | {"stored": [self._ledger.state, *self._stale()]}

    def __call__(self, nodes: Sequence[BaseNode], *, show_progress: bool = False, **kwargs: Any) -> Sequence[BaseNode]:
        """Stores the KV of nodes, and deletes that of what they replace; returns the nodes.

        Args:
            show_progress: show a bar.

        Raises:
            ModelError: the engine cannot start.
            StoreError: the store, or the list of documents beside it, cannot be opened.
        """
        chunks: defaultdict[str, dict[str, None]] = defaultdict(dict)
        versions: dict[str, str] = {}
        for node in nodes:
            document, source = node.ref_doc_id or node.node_id, node.source_node
            versions[document] = (source.hash if source else node.hash) or ""
            if text := node.get_content(metadata_mode=MetadataMode.LLM).strip():
                chunks[document][text] = None
        self._note(versions, chunks)
        texts = list(dict.fromkeys(text for found in chunks.values() for text in found))
        with tqdm(total=len(texts), desc="Computing KV", disable=not show_progress) as bar:
            store_chunks(self._llm.engine, texts, on_progress=lambda done, _: bar.update(done - bar.n) and None)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Like calling it, without blocking the event loop."""
        return await asyncio.to_thread(self.__call__, nodes, **kwargs)

    def delete(self, *ref_doc_ids: str) -> int:
        """Deletes the KV of documents' chunks, but for those that other documents hold too.

        Returns:
            how many entries were deleted.
        """
        return self._forget(self._ledger.remove(self.collection, ref_doc_ids))

    def _note(self, versions: dict[str, str], chunks: dict[str, dict[str, None]]) -> None:
        try:
            self.delete(*self._stale())
            self._forget(self._ledger.add(self.collection, versions, chunks))
        except StoreError as error:
            _log.warning("the KV of these documents will not be deleted with them: %s", error)

    def _forget(self, chunks: Sequence[str]) -> int:
        return forget_chunks(self._llm.engine, chunks) if chunks else 0

    def _stale(self) -> list[str]:
        """Documents that the docstore no longer has."""
        if self._docstore is None:
            return []
        there = {*self._docstore.get_all_document_hashes().values(), *(self._docstore.get_all_ref_doc_info() or {})}
        missing = self._ledger.documents(self.collection) - there
        # Of documents with equal hashes the docstore lists one.
        return sorted(document for document in missing if not self._docstore.document_exists(document))

    @property
    def _ledger(self) -> Ledger:
        folder, engine = self.config.store_path, self._llm.engine
        if folder is not None:
            if self._on_disk is None:
                about = json.dumps([self.model, self.config.namespace, self.engine_args], sort_keys=True, default=repr)
                self._on_disk = Ledger(folder, hashlib.sha256(about.encode()).hexdigest())
            return self._on_disk
        if engine not in _in_memory:
            _in_memory[engine] = Ledger(None, "")
        return _in_memory[engine]

    def __getstate__(self) -> dict[str, Any]:
        """Refused: whoever gets a copy in another process would start an engine there."""
        raise ConfigError("BlendIngestion computes KV in the process that holds the engine, not in worker processes: "
                          "leave it out of the pipeline and call it on the result, "
                          "ingestion(pipeline.run(documents=documents, num_workers=...))")
