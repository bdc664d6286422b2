"""A chain that puts documents into a prompt, and keeps them apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from blendrag.errors import PromptError
from langchain_core.language_models import LanguageModelLike
from langchain_core.output_parsers import BaseOutputParser, StrOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

from langchain_blendrag._settings import EngineSettings
from langchain_blendrag.documents import format_documents


def create_blend_documents_chain(
    llm: LanguageModelLike,
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: BaseOutputParser[Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_separator: str = "\n\n",
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """`create_stuff_documents_chain`, in which each formatted document is a chunk whose KV is reused.

    The model reads the very same text as in LangChain's chain, and both take the same arguments; this one fits into
    `create_retrieval_chain` as well.

    Example:
        >>> prompt = ChatPromptTemplate([("system", "Answer from these.\\n\\n{context}"), ("human", "{input}")])
        >>> chain = create_blend_documents_chain(ChatBlend(model="Qwen/Qwen3-8B"), prompt)
        >>> chain.invoke({"context": documents, "input": "Where is Paris?"})

    Args:
        llm: a `ChatBlend` or `BlendLLM`, also with arguments bound.
        prompt: holds the variable that `document_variable_name` names.
        output_parser: `StrOutputParser` where None.
        document_prompt: formats a document: "page_content" is its text, other variables are its metadata.  All of it is
            the chunk: give it to `BlendVectorStore` or `BlendRetriever` too, for them to store what will stand there.
        document_separator: text between two documents.
        document_variable_name: input of the chain that holds the documents.

    Raises:
        PromptError: the prompt has no such variable.
    """
    if document_variable_name not in prompt.input_variables:
        raise PromptError(f"the prompt has no variable {document_variable_name!r}, only "
                          f"{', '.join(prompt.input_variables) or 'none'}: put it where the documents shall stand, or "
                          "name another one as document_variable_name")
    delimiter = _delimiter(llm)

    def format_inputs(inputs: Mapping[str, Any]) -> str:
        return format_documents(inputs[document_variable_name], document_prompt=document_prompt,
                                separator=document_separator, delimiter=delimiter)

    fill = RunnablePassthrough.assign(**{document_variable_name: format_inputs}).with_config(run_name="format_inputs")
    chain: Runnable[dict[str, Any], Any] = fill | prompt | llm | (output_parser or StrOutputParser())
    return chain.with_config(run_name="stuff_documents_chain")


def _delimiter(llm: Any) -> str | None:
    """The delimiter that the model is configured with, `bind`, `with_config` and the like taken off it."""
    while not isinstance(llm, EngineSettings) and hasattr(llm, "bound"):
        llm = llm.bound
    return llm.config.delimiter if isinstance(llm, EngineSettings) else None
