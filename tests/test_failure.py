"""What an engine's process dies of reaches the process that started it."""

from __future__ import annotations

import logging
import uuid

import pytest

from blendrag.errors import InternalError, ModelError
from blendrag.runtime.compat import count_cached
from blendrag.runtime.engine.failure import FailureNote, as_error, leave_notes, own_fault

LOGGER = logging.getLogger("vllm.v1.engine.core")


@pytest.fixture
def engine_id():
    handlers = list(LOGGER.handlers)
    yield str(uuid.uuid4())
    LOGGER.handlers[:] = handlers


def die(error: Exception) -> None:
    try:
        raise error
    except Exception:
        LOGGER.exception("EngineCore failed to start.")


def test_the_first_failure_is_noted(engine_id):
    note = FailureNote(engine_id)
    leave_notes(engine_id)
    assert note.read() is None
    LOGGER.error("no exception")
    assert note.read() is None
    die(ModelError("it has no weights: add some"))
    die(RuntimeError("another rank is gone"))
    assert note.read() == ("ModelError", "it has no weights: add some")
    note.remove()
    assert note.read() is None


def test_nothing_is_noted_where_nobody_asked(engine_id):
    leave_notes(engine_id)
    die(ValueError("x"))
    note = FailureNote(engine_id)
    assert note.read() is None
    note.remove()


def test_only_our_own_classes_come_back():
    assert isinstance(as_error("ModelError", "x"), ModelError)
    assert as_error("ValueError", "x") is None
    assert as_error("__doc__", "x") is None


def fault_of(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return own_fault(error)


def test_a_fault_of_our_own_code_is_not_blamed_on_the_model():
    fault = fault_of(count_cached, object(), 1)
    assert isinstance(fault, InternalError)
    assert "AttributeError" in str(fault)
    assert "runtime/compat.py" in str(fault)
    assert fault_of(int, "x") is None
    assert fault_of(as_error, None, "x") is not None  # raised by our own line, where our files call vLLM's, too


def test_a_fault_of_our_own_code_is_noted_as_one(engine_id):
    note = FailureNote(engine_id)
    leave_notes(engine_id)
    try:
        count_cached(object(), 1)
    except AttributeError:
        LOGGER.exception("EngineCore failed to start.")
    assert note.read()[0] == "InternalError"
    note.remove()
