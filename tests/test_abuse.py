"""Bodies that are made to be expensive are refused in a sentence, or reach the scheduler as bounded work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from blendrag.bench.abuse import Abuse, abuses
from blendrag.config import BlendConfig
from blendrag.errors import RequestError
from blendrag.runtime.messages import ModelFacts
from blendrag.runtime.planning.locating import DocumentTokens, as_ids
from blendrag.runtime.planning.marks import parse_blend_params
from blendrag.runtime.planning.planner import Planner
from blendrag.serve.reader import DocumentReader
from blendrag.serve.rewriting import Rewriting
from blendrag.store import ChunkStore
from blendrag.tokens import SegmentTokenizer
from tests.helpers import make_request

CONFIG = BlendConfig()
LENGTH = 1024


@pytest.fixture(scope="module")
def tokens(smollm2: Path) -> SegmentTokenizer:
    return SegmentTokenizer(AutoTokenizer.from_pretrained(smollm2))


@pytest.mark.parametrize("abuse", abuses(size=50_000, prompt_words=200), ids=lambda abuse: abuse.name)
def test_a_body_that_is_made_to_be_expensive(abuse: Abuse, tokens: SegmentTokenizer) -> None:
    rewriting = Rewriting(CONFIG, lambda: DocumentReader(tokens, LENGTH))
    try:
        body = json.loads(rewriting(json.dumps(abuse.body).encode(), "/v1/completions"))
    except RequestError:  # a server without the middleware refuses nothing
        body = abuse.body
    request = make_request(tokens.text_ids(body["prompt"])[: LENGTH - 8])
    request.kv_transfer_params = body.get("kv_transfer_params")
    params = parse_blend_params(request, [])
    if params is None or len(params.spans) + len(params.documents) + len(params.document_ids) > CONFIG.max_documents:
        return
    with ChunkStore() as store:
        planner = Planner(CONFIG, store)
        planner.know(ModelFacts("model", 30))
        documents = [*map(as_ids, params.document_ids), *DocumentTokens(tokens)(params.documents,
                                                                                 request.prompt_token_ids)]
        plan = planner.plan(request, params.spans, params.policy, documents)
    if plan is not None:
        assert sum(len(missing.ids) for missing in plan.missing) <= len(request.prompt_token_ids) + 16 * len(documents)
