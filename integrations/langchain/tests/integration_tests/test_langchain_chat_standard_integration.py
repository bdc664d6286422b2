"""LangChain's own integration tests of chat models, on SmolLM2-135M on the CPU."""

from typing import Any

import pytest
from blendrag import BlendEngine
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_blendrag import ChatBlend


class TestChatBlend(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _parameters(self, engine: BlendEngine, hermes: str) -> None:
        self.parameters = {"engine": engine, "chat_template": hermes, "temperature": 0, "max_tokens": 64}

    @property
    def chat_model_class(self) -> type[ChatBlend]:
        return ChatBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.parameters

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # an engine holds one model
