"""A LlamaIndex query engine over a folder, asked twice: with nothing stored, then with the KV of its nodes stored.

    .venv/bin/python examples/llama_index_query.py [FOLDER [QUESTION]]

Without FOLDER, the documentation of this repository is read.
"""

import os
import sys
from pathlib import Path
from typing import Any

from blendrag.models import engine_arguments, fetch
from llama_index.core import QueryBundle, SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.ingestion.blendrag import BlendIngestion
from llama_index.llms.blendrag import BlendLLM
from llama_index.response_synthesizers.blendrag import BlendSynthesizer
from sentence_transformers import SentenceTransformer

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]
question = sys.argv[2] if len(sys.argv) > 2 else "What does the delimiter do?"
encoder = SentenceTransformer(str(fetch("minilm")))


class MiniLM(BaseEmbedding):
    """Embeds on this machine."""

    def _get_text_embedding(self, text: str) -> list[float]:
        return encoder.encode(text, normalize_embeddings=True).tolist()

    _get_query_embedding = _get_text_embedding

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class ShowReuse(BaseEventHandler):
    """Prints what blending did, as each response says."""

    def handle(self, event: Any, **_: Any) -> None:
        if isinstance(event, LLMChatEndEvent):
            blend = event.response.raw["blend"]
            print(f"{blend['prompt_tokens']} prompt tokens, {blend['chunks_reused']} of {blend['chunks_found']} chunks "
                  f"reused, {blend['rows']:.0%} of the rows computed, first token after {blend['first_token_s']:.2f} s")


llm = BlendLLM(fetch("smollm2"), engine_args=engine_arguments("smollm2"), temperature=0, max_tokens=40)
llm.complete("Hello.", max_tokens=1)  # the very first request pays for warming up
reader = SimpleDirectoryReader(str(folder), recursive=True, required_exts=[".md", ".txt"])
nodes = SentenceSplitter(chunk_size=256, chunk_overlap=0).get_nodes_from_documents(reader.load_data())
index = VectorStoreIndex(nodes, embed_model=MiniLM())
engine = index.as_query_engine(llm=llm, similarity_top_k=8, response_synthesizer=BlendSynthesizer(llm))
get_dispatcher().add_event_handler(ShowReuse())

print(f"\n{question} (from {len(nodes)} nodes)\n\nCold:")
cold = engine.query(question)
print(str(cold).strip())
# An application has BlendIngestion in its pipeline; here the nodes that the question finds are enough.
BlendIngestion(llm)([found.node for found in cold.source_nodes])
# In the same order vLLM's own prefix cache would hold them; here the best ones come last.
print("\nWarm, the same nodes in another order:")
print(str(engine.synthesize(QueryBundle(question), cold.source_nodes[::-1])).strip())
llm.close()
