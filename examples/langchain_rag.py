"""A LangChain chain over a folder, asked twice: with nothing stored, then with the KV of its documents stored.

    .venv/bin/python examples/langchain_rag.py [FOLDER [QUESTION]]

FOLDER holds .md, .txt, .html or .pdf files; without it, docs/ of this repository is read.
"""

import os
import sys
from pathlib import Path
from typing import Any

from blendrag.documents import read_folder, split
from blendrag.models import engine_arguments, fetch
from langchain_blendrag import (
    BlendVectorStore,
    ChatBlend,
    SentenceTransformerEmbeddings,
    create_blend_documents_chain,
)
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "docs"
question = sys.argv[2] if len(sys.argv) > 2 else "What does the delimiter do?"

model = ChatBlend(model=fetch("smollm2"), engine_args=engine_arguments("smollm2"), temperature=0, max_tokens=40)
pieces = [piece for source in read_folder(folder) for piece in split(source, model.get_num_tokens)]
documents = [Document(piece.text, metadata={"source": piece.source}) for piece in pieces]
embeddings = SentenceTransformerEmbeddings(str(fetch("minilm")))


class ShowReuse(BaseCallbackHandler):
    """Prints what blending did, as each result says."""

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        blend = (response.generations[0][0].generation_info or {})["blend"]
        print(f"{blend['prompt_tokens']} prompt tokens, {blend['chunks_reused']} of {blend['chunks_found']} chunks "
              f"reused, {blend['rows']:.0%} of the rows computed, first token after {blend['first_token_s']:.2f} s")


def ask(store: VectorStore) -> None:
    """Retrieves, prompts, answers."""
    # A beginning of its own: vLLM's prefix cache would hold the whole prompt the second time.
    system = f"Answer from these passages of the {type(store).__name__}.\n\n{{context}}"
    prompt = ChatPromptTemplate([("system", system), ("human", "{question}")])
    answers = create_blend_documents_chain(model, prompt)
    chain = {"context": store.as_retriever(search_kwargs={"k": 8}), "question": RunnablePassthrough()} | answers
    print(chain.invoke(question, {"callbacks": [ShowReuse()]}).strip())


model.invoke("Hello.", max_tokens=1)  # the very first request pays for warming up
print(f"\n{question} (from {len(documents)} chunks)\n\nAny vector store:")
ask(InMemoryVectorStore.from_documents(documents, embeddings))
store = BlendVectorStore(embeddings, llm=model)
store.add_documents(documents)
print("\nOne that stores KV:")
ask(store)
model.close()
