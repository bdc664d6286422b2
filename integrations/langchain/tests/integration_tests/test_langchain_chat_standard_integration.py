"""LangChain's own integration tests of chat models, on SmolLM2-135M on the CPU."""

from typing import Any

import pytest
from blendrag import BlendEngine
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_blendrag import ChatBlend


class TestChatBlend(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _parameters(self, engine: BlendEngine, hermes: str, request: pytest.FixtureRequest) -> None:
        # A call or an answer in JSON must come to its end, other answers may be cut short.
        long = any(word in request.node.name for word in ("tool", "structured", "json", "agent"))
        self.parameters = {"engine": engine, "chat_template": hermes, "temperature": 0, "max_tokens": 48 if long else 4}

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
