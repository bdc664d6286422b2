"""vLLM's own requests, as its scheduler makes them."""

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request


def make_request(ids, block_size=4, hash_name="sha256", **options) -> Request:
    """A request whose prompt is `ids`, with vLLM's block hashes; `block_size=None` for prefix caching switched off."""
    hasher = None
    if block_size is not None:
        hash_fn = get_hash_fn_by_name(hash_name)
        init_none_hash(hash_fn)
        hasher = get_request_block_hasher(block_size, hash_fn)
    options = {"sampling_params": SamplingParams(max_tokens=64), "pooling_params": None} | options
    return Request(request_id="request", prompt_token_ids=ids, block_hasher=hasher, **options)
