"""Response synthesis that keeps retrieved nodes whole, so that their stored KV is reused."""

from llama_index.response_synthesizers.blendrag.base import BlendSynthesizer
from llama_index.response_synthesizers.blendrag.prompt_helper import BlendPromptHelper

__all__ = ["BlendPromptHelper", "BlendSynthesizer"]
