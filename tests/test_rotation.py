"""Keys are moved with the model's own rotary embedding, and one that cannot be moved by a table is refused by name."""

import pytest
import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from blendrag.errors import ModelError
from blendrag.runtime.model.rotation import NoRotation, Rotation, TransformersRotation

POSITIONS = 2048
SIZE = 64
SCALED = {"factor": 4.0, "original_max_position_embeddings": 512}

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000},
    "other base": {"rope_type": "default", "rope_theta": 1_000_000},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED,
    "yarn": {"rope_type": "yarn"} | SCALED,
    "yarn with a large magnitude": {"rope_type": "yarn", "attention_factor": 3.0} | SCALED,
    "ntk": {"rope_type": "ntk", "factor": 4.0},
    "dynamic, a fixed table in vLLM": {"rope_type": "dynamic", "factor": 4.0},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.25},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "multimodal, for text": {"rope_type": "default", "mrope_section": [8, 12, 12]},
}
# Relative to keys of about 1: float32 is near its last bit, bf16 is rounded once for each step.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-5}

every_rope = pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
pairing = pytest.mark.parametrize("neox", [True, False], ids=["neox", "interleaved"])
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
table_dtypes = pytest.mark.parametrize("table", [torch.float32, torch.bfloat16], ids=lambda dtype: f"table {dtype}")


@pytest.fixture(autouse=True, scope="module")
def _vllm(smollm2):
    """vLLM's modules ask for a configuration when they are made."""
    model = ModelConfig(str(smollm2), max_model_len=POSITIONS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig(model_config=model)):
        yield
    torch.set_num_threads(threads)


def make_keys(dtype, tokens=200, heads=2, size=SIZE):
    """Keys, and two positions for each, the table's ends among them."""
    random = torch.Generator().manual_seed(1)
    keys = torch.randn(tokens, heads, size, generator=random).clamp(-3, 3).to(dtype)
    p, q = (torch.randint(0, POSITIONS, (tokens,), generator=random) for _ in range(2))
    p[:2], q[:2] = torch.tensor([0, POSITIONS - 1]), torch.tensor([POSITIONS - 1, 0])
    return keys, p, q


def by_vllm(module, keys, positions):
    flat = keys.reshape(len(keys), -1)
    return module(positions, flat.clone(), flat.clone())[1].reshape(keys.shape)


def make(rope, neox, table, dtype):
    module = get_rope(SIZE, POSITIONS, neox, rope, dtype=table)
    return module, Rotation(module, dtype)


def magnitude(rotation) -> float:
    """How much longer keys get by rotating, YaRN's mscale."""
    return float((rotation.cos[0] ** 2 + rotation.sin[0] ** 2).mean().sqrt())


def close(found, expected, scale=1.0):
    tolerance = TOLERANCE[found.dtype] * max(1.0, scale)
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@every_rope
@pairing
@table_dtypes
@dtypes
def test_keys_are_rotated_as_vllm_rotates_them(rope, neox, table, dtype):
    module, rotation = make(rope, neox, table, dtype)
    keys, p, _ = make_keys(dtype)
    rotated = rotation.rotate(keys, p)
    assert (rotated.dtype, rotated.shape) == (dtype, keys.shape)
    close(rotated, by_vllm(module, keys, p), magnitude(rotation))


@every_rope
@pairing
@table_dtypes
@dtypes
def test_a_key_moved_from_one_position_to_another_equals_one_rotated_there(rope, neox, table, dtype):
    module, rotation = make(rope, neox, table, dtype)
    keys, p, q = make_keys(dtype)
    moved = rotation.rotate(rotation.unrotate(by_vllm(module, keys, p), p), q)
    close(moved, by_vllm(module, keys, q), magnitude(rotation))


@pytest.mark.parametrize("trained", [512, 2 * POSITIONS], ids=["long table", "short table"])
@dtypes
def test_of_long_ropes_two_tables_the_one_that_vllm_took_is_used(trained, dtype):
    rope = {"rope_type": "longrope", "rope_theta": 10000, "original_max_position_embeddings": trained,
            "short_factor": [1 + i / 64 for i in range(32)], "long_factor": [1 + i / 4 for i in range(32)]}
    module, rotation = make(rope, True, dtype, dtype)
    assert module.use_long_rope == (trained < POSITIONS)
    keys, p, q = make_keys(dtype)
    moved = rotation.rotate(rotation.unrotate(by_vllm(module, keys, p), p), q)
    close(moved, by_vllm(module, keys, q), magnitude(rotation))


@every_rope
@pairing
@dtypes
def test_unrotating_gives_back_the_very_key(rope, neox, dtype):
    module, rotation = make(rope, neox, dtype, dtype)
    keys, p, _ = make_keys(dtype)
    close(rotation.unrotate(by_vllm(module, keys, p), p), keys)


@every_rope
@pairing
def test_the_loss_does_not_grow_with_the_distance(rope, neox):
    module, rotation = make(rope, neox, torch.bfloat16, torch.float32)
    keys, p, _ = make_keys(torch.float32)
    for end in (torch.zeros_like(p), torch.full_like(p, POSITIONS - 1)):
        moved = rotation.rotate(rotation.unrotate(by_vllm(module, keys, p), p), end)
        close(moved, by_vllm(module, keys, end), magnitude(rotation))


def test_dimensions_that_are_not_rotated_stay_bit_by_bit():
    module, rotation = make(ROPES["partial"], True, torch.float32, torch.bfloat16)
    keys, p, _ = make_keys(torch.bfloat16)
    assert module.rotary_dim == SIZE // 4
    for moved in (rotation.rotate(keys, p), rotation.unrotate(keys, p)):
        assert torch.equal(moved[..., SIZE // 4 :], keys[..., SIZE // 4 :])
        assert not torch.equal(moved[..., : SIZE // 4], keys[..., : SIZE // 4])


@pairing
def test_keys_may_be_a_view_and_are_left_alone(neox):
    _, rotation = make(ROPES["default"], neox, torch.float32, torch.float32)
    keys, p, _ = make_keys(torch.float32, heads=6)
    view, copy = keys[:, 1:5:2], keys.clone()
    assert torch.equal(rotation.rotate(view, p), rotation.rotate(view.contiguous(), p))
    assert torch.equal(rotation.unrotate(view, p), rotation.unrotate(view.contiguous(), p))
    assert torch.equal(keys, copy)


def test_no_keys_are_no_problem():
    _, rotation = make(ROPES["default"], True, torch.float32, torch.float32)
    nothing = torch.zeros(0, 2, SIZE)
    assert rotation.rotate(nothing, torch.zeros(0, dtype=torch.int64)).shape == (0, 2, SIZE)


def test_layers_with_other_dtypes_can_share_a_module():
    module = get_rope(SIZE, POSITIONS, True, ROPES["llama3"] | {"rope_theta": 7}, dtype=torch.float32)
    exact = Rotation(module, torch.float32)
    keys, p, _ = make_keys(torch.float32)
    before = exact.rotate(keys, p)
    close(Rotation(module, torch.bfloat16).rotate(keys.bfloat16(), p), before)
    assert torch.equal(exact.rotate(keys, p), before)


def test_a_layer_without_positions_leaves_keys_alone():
    keys, p, _ = make_keys(torch.bfloat16)
    assert torch.equal(NoRotation().rotate(keys, p), keys)
    assert torch.equal(NoRotation().unrotate(keys, p), keys)


@pairing
def test_the_last_dimensions_of_a_head_are_turned_where_those_are_the_rotary_ones(neox):
    module, rotation = make(ROPES["default"], neox, torch.float32, torch.float32)
    [last] = rotation.variants(SIZE + 32)
    keys, p, _ = make_keys(torch.float32, size=SIZE + 32)
    there = by_vllm(module, keys[..., 32:].contiguous(), p)
    moved = last.rotate(keys, p)
    assert torch.equal(moved[..., :32], keys[..., :32])
    close(moved[..., 32:], there)
    close(last.unrotate(moved, p), keys)
    assert rotation.variants(SIZE) == []


# Models that vLLM runs through transformers: one module that gives angles, and layers that apply them.


def turned(keys, cos, sin, neox, sign=1):
    """As attention layers of transformers do it, with tables as wide as the rotary dimensions."""
    half = cos.shape[-1] // 2
    if neox:
        partner = torch.cat([-keys[..., half:], keys[..., :half]], -1)
    else:
        partner = torch.stack([-keys[..., 1::2], keys[..., ::2]], -1).flatten(-2)
    return keys * cos + sign * partner * sin


class Angles(torch.nn.Module):
    """A rotary module of transformers, with frequencies of its own for each layer type."""

    def __init__(self, layout, dynamic=False):
        super().__init__()
        self.layout, self.dynamic = layout, dynamic
        for name, base in (("full_attention", 1e6), ("sliding_attention", 1e4)):
            frequencies = 1 / base ** (torch.arange(0, SIZE, 2) / SIZE)
            self.register_buffer(f"{name}_inv_freq", frequencies, persistent=False)

    def forward(self, states, positions, layer_type):
        scale = positions.max() if self.dynamic else 1.0
        angles = positions[..., None].float() * getattr(self, f"{layer_type}_inv_freq") / scale
        twice = {"halves": torch.cat([angles, angles], -1), "neighbours": angles.repeat_interleave(2, -1)}
        found = twice.get(self.layout, angles)
        return found.cos().to(states.dtype), found.sin().to(states.dtype)


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
@pytest.mark.parametrize("layout", ["halves", "neighbours", "once"])
@pytest.mark.parametrize("sign", [1, -1], ids=["forwards", "backwards"])
@pairing
def test_a_way_of_applying_the_angles_of_a_transformers_module_is_found(layer_type, layout, sign, neox):
    module = Angles(layout)
    rotation = TransformersRotation(module, POSITIONS, torch.float32, layer_type)
    keys, p, _ = make_keys(torch.float32)
    angles = p[:, None].float() * getattr(module, f"{layer_type}_inv_freq")
    angles = (torch.cat([angles, angles], -1) if neox else angles.repeat_interleave(2, -1))[:, None]
    expected = turned(keys, angles.cos(), angles.sin(), neox, sign)
    ways = rotation, *rotation.variants(SIZE)
    assert [torch.allclose(way.rotate(keys, p), expected, atol=1e-3) for way in ways].count(True) == 1


# What is refused.


def test_a_transformers_module_that_depends_on_the_length_is_refused_by_name():
    with pytest.raises(ModelError, match="Angles depends on the length of the sequence"):
        TransformersRotation(Angles("halves", dynamic=True), POSITIONS, torch.float32, "full_attention")


def test_a_module_without_angles_is_refused_by_name():
    with pytest.raises(ModelError, match="Angles is called otherwise"):
        TransformersRotation(Angles("halves"), POSITIONS, torch.float32)


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "use_fope": True, "num_key_value_heads": 2, "num_inv_freq": None, "fope_sep_head": True,
     "fope_init_factor": 0.5},
    {"rope_type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 0.7} | SCALED,
], ids=["one table per head", "deepseek's yarn"])
@dtypes
def test_an_embedding_without_a_usable_table_is_refused_by_name(rope, dtype):
    module = get_rope(SIZE, POSITIONS, True, rope, dtype=dtype)
    with pytest.raises(ModelError, match=f"{type(module).__name__} .* use a model with"):
        Rotation(module, dtype)


class LengthDependent(torch.nn.Module):
    """As HF's dynamic NTK: beyond `trained` positions, the whole sequence is rotated with another base."""

    def __init__(self, trained):
        super().__init__()
        self.short = get_rope(SIZE, POSITIONS, True, ROPES["default"], dtype=torch.float32)
        self.long = get_rope(SIZE, POSITIONS, True, ROPES["other base"], dtype=torch.float32)
        self.trained, self.head_size, self.cos_sin_cache = trained, SIZE, self.short.cos_sin_cache

    def forward(self, positions, query, key):
        return (self.short if positions.max() < self.trained else self.long)(positions, query, key)


@pytest.mark.parametrize("trained", [2, 512, POSITIONS - 1])
def test_an_embedding_that_depends_on_the_length_is_refused_by_name(trained):
    with pytest.raises(ModelError, match="LengthDependent depends on the length of the sequence"):
        Rotation(LengthDependent(trained), torch.float32)


class Scaled(torch.nn.Module):
    """Does more to the keys than its table says."""

    def __init__(self, factor):
        super().__init__()
        self.inner = get_rope(SIZE, POSITIONS, True, ROPES["default"], dtype=torch.float32)
        self.factor, self.head_size, self.cos_sin_cache = factor, SIZE, self.inner.cos_sin_cache

    def forward(self, positions, query, key):
        query, key = self.inner(positions, query, key)
        return query, key * self.factor


@pytest.mark.parametrize("factor", [1.1, -1.0])
@dtypes
def test_an_embedding_that_does_more_than_its_table_is_refused_by_name(factor, dtype):
    with pytest.raises(ModelError, match="Scaled does more than a cos/sin table says"):
        Rotation(Scaled(factor), dtype)


def test_a_module_without_a_table_is_refused_by_name():
    with pytest.raises(ModelError, match="Identity has no fixed cos/sin table"):
        Rotation(torch.nn.Identity(), torch.float32)
