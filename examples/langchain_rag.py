"""An ordinary LangChain RAG chain, asked twice: with nothing stored, then with the KV of its documents stored.

    .venv/bin/python examples/langchain_rag.py [FOLDER [QUESTION]]

FOLDER holds .md, .txt, .html or .pdf files; without it, the documentation of this repository is read.
"""

import os
import sys
from pathlib import Path
from typing import Any

from blendrag.documents import read_folder, split
from blendrag.models import fetch
from langchain_blendrag import BlendLLM, BlendRetriever, SentenceTransformerEmbeddings, format_documents
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
folder = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]
question = sys.argv[2] if len(sys.argv) > 2 else "What does the delimiter do?"

llm = BlendLLM(model=fetch("smollm2"), temperature=0, max_tokens=40)
pieces = [piece for source in read_folder(folder) for piece in split(source, llm.get_num_tokens)]
documents = [Document(piece.text, metadata={"source": piece.source}) for piece in pieces]
vectors = InMemoryVectorStore.from_documents(documents, SentenceTransformerEmbeddings(str(fetch("minilm"))))
retriever = vectors.as_retriever(search_kwargs={"k": 8})
prompt = ChatPromptTemplate([("system", "Answer from these passages.\n\n{context}"), ("human", "{question}")])


class ShowReuse(BaseCallbackHandler):
    """Prints what blending did, as each result says."""

    def on_llm_end(self, response: LLMResult, **_: Any) -> None:
        blend = (response.generations[0][0].generation_info or {})["blend"]
        print(f"{blend['prompt_tokens']} prompt tokens, {blend['chunks_reused']} of {blend['chunks_found']} chunks "
              f"reused, {blend['rows']:.0%} of the rows computed, first token after {blend['first_token_s']:.2f} s")


def ask(retriever: BaseRetriever) -> None:
    """Retrieves, formats, prompts, answers."""
    chain = {"context": retriever | format_documents, "question": RunnablePassthrough()} | prompt | llm
    print(chain.invoke(question, {"callbacks": [ShowReuse()]}).strip())


llm.invoke("Hello.", max_tokens=1)  # the very first request pays for warming up
print(f"\n{question} (from {len(documents)} chunks)\n\nCold:")
ask(retriever)
print("\nWarm:")
ask(BlendRetriever(retriever=retriever, llm=llm))
llm.close()
