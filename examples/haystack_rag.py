"""A Haystack RAG pipeline, asked twice: by vLLM alone, then with the KV of the documents that the indexing stored.

    .venv/bin/python examples/haystack_rag.py [PATH [QUESTION]]

PATH is a .md, .txt, .html or .pdf file, or a folder of them; without it, the README of this repository is read.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from blendrag.documents import read_folder
from blendrag.models import engine_arguments, fetch
from haystack import Document, Pipeline, component
from haystack.components.builders import ChatPromptBuilder
from haystack.components.preprocessors import DocumentSplitter
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack_integrations.components.generators.blendrag import BlendChatGenerator
from haystack_integrations.components.writers.blendrag import BlendDocumentWriter
from sentence_transformers import SentenceTransformer

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
path = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "README.md"
question = sys.argv[2] if len(sys.argv) > 2 else "What does the delimiter do?"
encoder = SentenceTransformer(str(fetch("minilm")))


@component
class EmbedDocuments:
    """Embeds documents on this machine."""

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        vectors = encoder.encode([document.content for document in documents], show_progress_bar=False).tolist()
        return {"documents": [replace(one, embedding=vector) for one, vector in zip(documents, vectors, strict=True)]}


@component
class EmbedText:
    """Embeds a question on this machine."""

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, Any]:
        return {"embedding": encoder.encode(text).tolist()}


settings = {"model": fetch("smollm2"), "engine_args": engine_arguments("smollm2")}
store = InMemoryDocumentStore(embedding_similarity_function="cosine")

indexing = Pipeline()
indexing.add_component("splitter", DocumentSplitter(split_by="word", split_length=120, split_threshold=30))
indexing.add_component("embedder", EmbedDocuments())
indexing.add_component("writer", BlendDocumentWriter(store, **settings))  # stores documents, and their KV
indexing.connect("splitter", "embedder")
indexing.connect("embedder", "writer")

asking = Pipeline()
asking.add_component("embedder", EmbedText())
asking.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=8))
asking.add_component("builder", ChatPromptBuilder([
    ChatMessage.from_system("Answer from these passages.\n{% for document in documents %}\n{{ document.content }}\n"
                            "{% endfor %}"),
    ChatMessage.from_user("{{ question }}"),
]))
asking.add_component("llm", BlendChatGenerator(**settings, generation_kwargs={"temperature": 0, "max_tokens": 24}))
asking.connect("embedder", "retriever")
asking.connect("retriever", "builder.documents")
asking.connect("retriever", "llm.documents")  # their texts are found in the prompt
asking.connect("builder", "llm.messages")


def ask(**generation_kwargs: Any) -> None:
    """Runs the pipeline and prints the answer, and what blending did, as the reply says."""
    result = asking.run({"embedder": {"text": question}, "builder": {"question": question},
                         "llm": {"generation_kwargs": generation_kwargs}})
    [reply] = result["llm"]["replies"]
    blend = reply.meta["blend"]
    print(f"{blend['prompt_tokens']} prompt tokens, {blend['chunks_reused']} of {blend['chunks_found']} chunks reused, "
          f"{blend['rows']:.0%} of the rows computed, first token after {blend['first_token_s']:.2f} s")
    print((reply.text or "").strip())


texts = [Document(content=source.text, meta={"source": source.path}) for source in read_folder(path)]
written = indexing.run({"splitter": {"documents": texts}})["writer"]
print(f"\n{question} (from {written['documents_written']} documents)\n\nBlended:")
ask()
print("\nvLLM alone:")  # last: what it leaves in its prefix cache is exact, and would be preferred
ask(blend=False)
asking.close()
indexing.close()
