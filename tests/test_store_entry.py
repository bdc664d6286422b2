"""An entry is two tensors of a kind, whatever KV is made of, and the store keeps it bit by bit."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from blendrag.errors import StoreError
from blendrag.store import ChunkStore, KVEntry, entry_key, prefix_digest

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8]
SHAPE = (2, 5, 3, 8)


def make_key(number: int, fingerprint: str = "model", namespace: str = "default") -> str:
    return entry_key(fingerprint, namespace, prefix_digest(), [number])


def make_entry(seed: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.bfloat16) -> KVEntry:
    """Random bytes, so that NaNs and infinities occur too."""
    size = torch.Size(shape).numel() * dtype.itemsize
    random = torch.Generator().manual_seed(seed)
    k, v = (torch.randint(0, 256, (size,), generator=random, dtype=torch.uint8) for _ in range(2))
    return KVEntry(k.view(dtype).view(shape), v.view(dtype).view(shape))


def same(a: KVEntry | None, b: KVEntry | None) -> bool:
    """Equal bit by bit; NaN is not equal to itself."""
    if a is None or b is None:
        return a is b
    return a.k.dtype == b.k.dtype and a.k.shape == b.k.shape and all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in ((a.k, b.k), (a.v, b.v))
    )


CHUNK = 40


def make_ids(number: int, tokens: int = CHUNK) -> list[int]:
    """Token ids that no other number has."""
    return list(range(1000 * number, 1000 * number + tokens))


def put_findable(store: ChunkStore, number: int, prefix: bytes | None = None, fingerprint: str = "model",
                 namespace: str = "default") -> str:
    """Stores the chunk `make_ids(number)`."""
    prefix = prefix_digest() if prefix is None else prefix
    ids = make_ids(number)
    key = entry_key(fingerprint, namespace, prefix, ids)
    store.put(key, make_entry(number, (1, CHUNK, 1, 2)), fingerprint=fingerprint, namespace=namespace, prefix=prefix,
              ids=ids)
    return key


def find(store: ChunkStore, *numbers: int, fingerprint: str = "model", namespace: str = "default") -> list[str]:
    """Keys of the chunks found in a prompt that is made of these."""
    prompt = [id_ for number in numbers for id_ in [999_999, *make_ids(number)]]
    matches = store.find(prompt, fingerprint=fingerprint, namespace=namespace)
    return [key for match in matches for key in match.variants.values()]


def put(store: ChunkStore, number: int, entry: KVEntry, fingerprint: str = "model", namespace: str = "default") -> str:
    key = make_key(number, fingerprint, namespace)
    store.put(key, entry, fingerprint=fingerprint, namespace=namespace)
    return key


def test_an_entry_knows_its_size():
    entry = make_entry(0, (4, 7, 2, 16))
    assert (entry.tokens, entry.nbytes) == (7, 2 * 4 * 7 * 2 * 16 * 2)
    assert repr(entry) == "KVEntry(bfloat16 [4, 7, 2, 16] on cpu)"


@pytest.mark.parametrize(("k", "v", "problem"), [
    (torch.zeros(2, 5, 3, 8), torch.zeros(2, 4, 3, 8), "two of a kind"),
    (torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3, 8).half(), "two of a kind"),
    (torch.zeros(5, 3, 8), torch.zeros(5, 3, 8), r"needs \[layers, tokens, kv heads, head size\]"),
    (torch.zeros(2, 0, 3, 8), torch.zeros(2, 0, 3, 8), "none empty"),
    (torch.zeros(SHAPE, dtype=torch.complex64), torch.zeros(SHAPE, dtype=torch.complex64), "use float32, float16"),
])
def test_what_is_no_entry_is_refused(k, v, problem):
    with pytest.raises(StoreError, match=problem):
        KVEntry(k, v)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_survives_the_disk_bit_by_bit(tmp_path, dtype):
    entry = make_entry(1, dtype=dtype)
    with ChunkStore(tmp_path) as store:
        key = put(store, 1, entry)
    with ChunkStore(tmp_path) as store:
        assert same(store.get(key), entry)


def test_views_of_larger_tensors_are_stored_without_the_rest(tmp_path):
    both = torch.randn(2, 5, 2, 3, 1000)
    entry = KVEntry(both[:, :, 0, :, :8], both[:, :, 1, :, :8])
    for store in (ChunkStore(), ChunkStore(tmp_path)):
        with store:
            key = put(store, 1, entry)
            assert same(store.get(key), entry)
            assert store.stats.ram_bytes == entry.nbytes


def test_keys_and_values_may_be_one_tensor(tmp_path):
    tensor = torch.randn(SHAPE)
    with ChunkStore(tmp_path, ram_bytes=0) as store:
        key = put(store, 1, KVEntry(tensor, tensor))
        assert same(store.get(key), KVEntry(tensor, tensor))


def test_tensors_that_need_gradients_are_stored_without_them(tmp_path):
    entry = KVEntry(torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE, requires_grad=True))
    with ChunkStore(tmp_path) as store:
        assert not store.get(put(store, 1, entry)).k.requires_grad


def test_files_are_plain_safetensors_that_say_what_they_are(tmp_path):
    entry = make_entry(1)
    with ChunkStore(tmp_path) as store:
        key = put(store, 1, entry, fingerprint="a-very-long-fingerprint")
    file = tmp_path / "a-very-long-fing" / key[:2] / f"{key}.safetensors"
    loaded = load_file(file)
    assert same(KVEntry(loaded["k"], loaded["v"]), entry)
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"key": key, "fingerprint": "a-very-long-fingerprint", "namespace": "default"}


def test_pinned_memory_is_used_where_there_is_cuda_and_ignored_with_one_warning_elsewhere(tmp_path, caplog):
    with ChunkStore(tmp_path, pin_memory=True) as store:
        key, _ = put(store, 1, make_entry(1)), put(store, 2, make_entry(2))
        assert store.get(key).k.is_pinned() == torch.cuda.is_available()
    with ChunkStore(tmp_path, pin_memory=True) as store:
        assert same(store.get(key), make_entry(1))
    ignored = [record for record in caplog.records if "no CUDA device" in record.getMessage()]
    assert len(ignored) == (0 if torch.cuda.is_available() else 2)
