"""LangChain's own integration tests of chat models, on SmolLM2-135M on the CPU."""

from typing import Any

import pytest
from blendrag import BlendEngine
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_blendrag import ChatBlend


@pytest.fixture
def engine(smollm2_engine: BlendEngine) -> BlendEngine:
    """One that writes what makes sense."""
    return smollm2_engine


class TestChatBlend(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _parameters(self, engine: BlendEngine, hermes: str, request: pytest.FixtureRequest) -> None:
        # A call or an answer in JSON must come to its end, other answers may be cut short.
        name = request.node.name
        long = any(word in name for word in ("tool", "structured", "json", "agent"))
        tokens = 96 if "unicode" in name else 48 if long else 4
        self.parameters = {"engine": engine, "chat_template": hermes, "temperature": 0, "max_tokens": tokens}

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

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason=(
        "the model may choose here, and one of 135M parameters talks about the weather instead of calling the tool; "
        "test_langchain_agents.py runs the loop with the first call forced"))
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(strict=True, raises=AssertionError, reason=(
        "it allows several calls at once and counts on the model to make one; this one repeats it"))
    def test_tool_calling_with_no_arguments(self, model: BaseChatModel) -> None:
        super().test_tool_calling_with_no_arguments(model)

    @pytest.mark.xfail(strict=True, raises=OutputParserException, reason=(
        "JSON mode leaves the keys to the model, and one of 135M parameters forgets the second; the same form passes "
        "where the schema is given (test_structured_output)"))
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)
