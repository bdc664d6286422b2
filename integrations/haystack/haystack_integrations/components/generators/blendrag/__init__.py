"""Haystack chat generator of blendrag."""

from haystack_integrations.components.generators.blendrag.chat.chat_generator import BlendChatGenerator

__all__ = ["BlendChatGenerator"]
