"""JSON by vLLM's structured outputs, with no white space to lose oneself in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features
from xgrammar import Grammar


def guided_json(schema: Mapping[str, Any] | None) -> StructuredOutputsParams:
    """vLLM's parameters for an answer that is JSON of this schema, or any JSON object.

    vLLM lets a model put any white space between the tokens of JSON, and small models put line breaks until they run
    out of tokens; the switch against it is one of the engine, not of a request.  So the schema is handed over as the
    grammar of JSON with one space after commas and colons.  What xgrammar cannot express goes the ordinary way.
    """
    wanted = {"type": "object"} if schema is None else dict(schema)
    if has_xgrammar_unsupported_json_features(wanted):
        return StructuredOutputsParams(json=wanted)
    try:
        return StructuredOutputsParams(grammar=str(Grammar.from_json_schema(json.dumps(wanted), any_whitespace=False)))
    except RuntimeError:  # vLLM says of such a schema what is wrong with it
        return StructuredOutputsParams(json=wanted)
