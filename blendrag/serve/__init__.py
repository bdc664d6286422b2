"""What an OpenAI-compatible server needs besides vLLM's own.

`blendrag serve` starts a server that has it; elsewhere, `vllm serve --middleware blendrag.serve.DocumentsMiddleware`.
"""

from blendrag.serve.middleware import DocumentsMiddleware

__all__ = ["DocumentsMiddleware"]
