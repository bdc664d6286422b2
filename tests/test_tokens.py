"""A prompt is tokenised segment by segment: a chunk's ids are its own, its text is data, nothing is lost in between."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from vllm.config import ModelConfig

from blendrag.errors import PromptError
from blendrag.models import fetch
from blendrag.prompt import DELIMITER, BlendPrompt, Chunk
from blendrag.runtime.compat import load_tokenizer
from blendrag.runtime.planning.marks import delimited
from blendrag.tokens import SegmentTokenizer

CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<|im_start|>user", "<<s>s>"]
CORPUS = ["the quick brown fox jumps over the lazy dog. Paris is the capital\n\n", "where is Paris? \n\n"] * 20
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(normalizer=None, template="<s> $A") -> PreTrainedTokenizerFast:
    """Llama 3's kind: byte-level BPE, BOS from the post-processor, added tokens of which some are not special."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(CORPUS, trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=[*CONTROL, "†"],
        show_progress=False))
    return finish(inner, normalizer, template)


def metaspace(prepend_scheme, newlines=False) -> PreTrainedTokenizerFast:
    """Llama 2's kind: SentencePiece BPE with byte fallback, which puts a space before each text it encodes."""
    inner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                       decoders.Strip(" ", 1, 0)])
    corpus = CORPUS if newlines else [line.strip() for line in CORPUS]
    inner.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=500, max_token_length=8, special_tokens=["<unk>", *CONTROL, *BYTES], show_progress=False))
    state = json.loads(inner.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    return finish(Tokenizer.from_str(json.dumps(state)), None, "<s> $A")


def finish(inner, normalizer, template):
    inner.normalizer = normalizer
    inner.add_tokens([AddedToken(token, special=False, normalized=True) for token in ADDED])
    if template:
        inner.post_processor = processors.TemplateProcessing(
            single=template, pair="$A $B", special_tokens=[(t, inner.token_to_id(t)) for t in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>",
                                   additional_special_tokens=["<|im_start|>", "<|im_end|>"])


TOKENIZERS = {
    "smollm2": SegmentTokenizer(AutoTokenizer.from_pretrained(fetch("smollm2"))),
    "bos": SegmentTokenizer(byte_level()),
    "bos and eos": SegmentTokenizer(byte_level(template="<s> $A </s>")),
    "no bos": SegmentTokenizer(byte_level(template=None)),
    "space always": SegmentTokenizer(metaspace("always")),
    "space first": SegmentTokenizer(metaspace("first")),
}
BYTE_LEVEL = [name for name in TOKENIZERS if "space" not in name]
SPACED = [name for name in TOKENIZERS if "space" in name]

every_tokenizer = pytest.mark.parametrize("tokens", TOKENIZERS.values(), ids=TOKENIZERS)
byte_level_ones = pytest.mark.parametrize("tokens", [TOKENIZERS[name] for name in BYTE_LEVEL], ids=BYTE_LEVEL)
spaced_ones = pytest.mark.parametrize("tokens", [TOKENIZERS[name] for name in SPACED], ids=SPACED)
fewer = settings(max_examples=60, deadline=None)

spelled = st.sampled_from([*CONTROL, *ADDED, "†", "<|endoftext|>", "<", ">", "|", DELIMITER, "\ue001", " ", "\n\n",
                           "é", "日"])
texts = st.text() | st.lists(spelled | st.text(max_size=3), max_size=8).map("".join)
texts = texts.map(lambda text: text.replace("▁", "_"))  # which SentencePiece itself reads as a space
some_text = texts.filter(bool)
parts = st.lists(some_text | some_text.map(Chunk), max_size=5)


def control_ids(tokenizer) -> set[int]:
    return set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)


def spellable(tokens, text: str) -> str:
    """SmolLM2's vocabulary lacks a few bytes, of control characters and of unassigned planes."""
    if tokens is not TOKENIZERS["smollm2"]:
        return text
    return "".join("?" if letter > "\U0003ffff" or letter in "\x04\x06\x13\x14\x16\x1d" else letter for letter in text)


def without_control(text: str) -> str:
    for token in [*CONTROL, *ADDED, "<", ">"]:
        text = text.replace(token, "x")
    return text


# A chunk's text is data.


@every_tokenizer
@fewer
@given(text=texts)
def test_no_text_of_a_chunk_becomes_a_control_token(tokens, text):
    assert control_ids(tokens.tokenizer).isdisjoint(tokens.chunk_ids(text))


@byte_level_ones
@fewer
@given(text=texts)
def test_a_chunk_decodes_to_its_text(tokens, text):
    text = spellable(tokens, text)
    assert tokens.tokenizer.decode(tokens.chunk_ids(text)) == text


@spaced_ones
@fewer
@given(text=texts)
def test_a_chunk_gets_no_space_where_the_tokenizer_puts_one_before_each_text(tokens, text):
    assert tokens.tokenizer.decode(tokens.text_ids("a", first=True) + tokens.chunk_ids(text)) == "a" + text


def test_a_chunk_that_starts_with_a_new_line_gets_no_space_either():
    tokens = SegmentTokenizer(metaspace("first", newlines=True))
    assert "\n\n" in tokens.tokenizer.get_vocab()  # so that a text's first new line joins one before it
    for text in ["\nthe fox", "\n\nthe fox", "\n"]:
        assert tokens.tokenizer.decode(tokens.text_ids("a", first=True) + tokens.chunk_ids(text)) == "a" + text


@pytest.mark.parametrize("text", ["＜tool_call＞", "a ＜/tool_call＞ b", "＜｜im_start｜＞user", "ﬁne ＜tool_call＞"])
def test_a_normalizer_cannot_spell_a_control_token_either(text):
    tokens = SegmentTokenizer(byte_level(normalizers.NFKC()))
    assert control_ids(tokens.tokenizer).isdisjoint(tokens.chunk_ids(text))


def test_added_tokens_of_white_space_are_ordinary_text():
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("   ", special=False), AddedToken("\n\n", special=False)])
    text = "a   b\n\nc"
    assert SegmentTokenizer(tokenizer).chunk_ids(text) == tokenizer.encode(text, add_special_tokens=False)
    assert len(tokenizer.encode("   \n\n", add_special_tokens=False)) == 2


@every_tokenizer
def test_text_that_is_no_valid_unicode_is_refused_with_the_remedy(tokens):
    for tokenize in (tokens.chunk_ids, tokens.text_ids):
        with pytest.raises(PromptError, match="surrogate"):
            tokenize("half a pair: \ud83d")


@every_tokenizer
def test_ordinary_text_has_the_ids_that_the_tokenizer_gives_it(tokens):
    text = "the quick brown fox"
    first = tokens.tokenizer.encode(text, add_special_tokens=False)
    assert tokens.text_ids(text, first=True) == first
    if not tokens._adds_space:
        assert tokens.chunk_ids(text) == tokens.text_ids(text) == first


# A prompt's text is not.


@every_tokenizer
def test_control_tokens_in_the_prompts_text_count_as_such(tokens):
    names = {token.content for token in tokens.tokenizer.added_tokens_decoder.values()}
    for token in sorted(names & {"<|im_end|>", "<tool_call>", "†"}):
        known = tokens.tokenizer.convert_tokens_to_ids(token)
        assert known not in tokens.chunk_ids(f"a{token}b")
        assert known in tokens.text_ids(f"a{token}b")
        assert known in tokens.text_ids(f"a{token}b", first=True)


# The prompt is its segments.


@every_tokenizer
@fewer
@given(parts=parts, special=st.booleans())
def test_the_spans_hold_the_chunks_and_the_rest_is_text(tokens, parts, special):
    prompt = BlendPrompt(*parts, add_special_tokens=special)
    tokenized = tokens(prompt)
    assert [tokenized.ids[a:b] for a, b in tokenized.spans] == [tokens.chunk_ids(text) for text in prompt.chunks]
    ends = [0, *(at for span in tokenized.spans for at in span), len(tokenized.ids)]
    assert ends == sorted(ends)
    if special:
        assert tokenized.ids[: len(tokens.leading_ids)] == tokens.leading_ids
        assert tokenized.ids[len(tokenized.ids) - len(tokens.trailing_ids) :] == tokens.trailing_ids


@byte_level_ones
@fewer
@given(parts=parts)
def test_a_prompt_decodes_to_its_text(tokens, parts):
    spelled = [Chunk(spellable(tokens, p.text)) if isinstance(p, Chunk) else spellable(tokens, p) for p in parts]
    prompt = BlendPrompt(*spelled, add_special_tokens=False)
    assert tokens.tokenizer.decode(tokens(prompt).ids) == prompt.text


@spaced_ones
@fewer
@given(parts=parts)
def test_a_prompt_decodes_to_its_text_without_spaces_between_its_segments(tokens, parts):
    plain = [Chunk(without_control(p.text)) if isinstance(p, Chunk) else without_control(p) for p in parts]
    prompt = BlendPrompt("a", *plain, "z", add_special_tokens=False)
    assert tokens.tokenizer.decode(tokens(prompt).ids) == prompt.text


@every_tokenizer
@fewer
@given(text=some_text, special=st.booleans())
def test_a_prompt_without_chunks_is_tokenised_as_ever(tokens, text, special):
    text = re.sub("^(<s>)+", "", text) or "a"  # see the test of doubled BOS
    prompt = BlendPrompt(text, add_special_tokens=special)
    assert tokens(prompt).ids == tokens.tokenizer.encode(text, add_special_tokens=special)


@every_tokenizer
def test_neighbouring_texts_are_one_text(tokens):
    whole = tokens(BlendPrompt("Answer #1 from these", Chunk("the fox"), "where is it?"))
    assert tokens(BlendPrompt("Ans", "wer #", "1 from these", Chunk("the fox"), "whe", "re is it?")) == whole


@every_tokenizer
def test_an_empty_prompt_has_no_tokens_but_the_tokenizers_own(tokens):
    assert tokens(BlendPrompt()).ids == tokens.leading_ids + tokens.trailing_ids
    assert tokens(BlendPrompt(add_special_tokens=False)).ids == []
    assert tokens.chunk_ids("") == tokens.text_ids("") == tokens.text_ids("", first=True) == []


def test_what_the_tokenizer_puts_around_a_prompt_is_known():
    bos, eos = 0, 1
    assert (TOKENIZERS["smollm2"].leading_ids, TOKENIZERS["smollm2"].trailing_ids) == ([], [])
    assert (TOKENIZERS["no bos"].leading_ids, TOKENIZERS["no bos"].trailing_ids) == ([], [])
    assert (TOKENIZERS["bos"].leading_ids, TOKENIZERS["bos"].trailing_ids) == ([bos], [])
    assert (TOKENIZERS["bos and eos"].leading_ids, TOKENIZERS["bos and eos"].trailing_ids) == ([bos], [eos])
    assert TOKENIZERS["space first"].leading_ids == [1]


@every_tokenizer
@fewer
@given(around=st.tuples(texts, some_text, some_text, texts))
def test_the_default_delimiter_is_found_in_the_ids_of_a_text_whatever_stands_beside_it(tokens, around):
    """Clients of a server send text, in which its tokens could merge with their neighbours'."""
    pieces = [f"a{spellable(tokens, without_control(text)).replace(DELIMITER, '')}." for text in around]
    ids, delimiter_ids = tokens.tokenizer.encode(DELIMITER.join(pieces)), tokens.text_ids(DELIMITER)
    spans = delimited(ids, delimiter_ids)
    assert [tokens.tokenizer.decode(ids[start:end]) for start, end in spans] == pieces[1:-1]


def test_an_engine_with_a_tokenizer_of_its_own_is_read_with_that_one(tmp_path):
    TOKENIZERS["bos"].tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(str(fetch("smollm2")), tokenizer=str(tmp_path)))
    assert SegmentTokenizer(tokenizer).text_ids(DELIMITER) == TOKENIZERS["bos"].text_ids(DELIMITER)


# What chunks are encoded behind.


@every_tokenizer
@fewer
@given(before=st.lists(some_text, min_size=1, max_size=3), chunk=some_text)
def test_a_prompts_tokens_before_the_first_chunk_are_those_of_its_prefix(tokens, before, chunk):
    prompt = BlendPrompt(*before, Chunk(chunk), "where?")
    tokenized = tokens(prompt)
    assert tokenized.ids[: tokenized.spans[0][0]] == tokens.prefix_ids(prompt.prefix)


@every_tokenizer
@fewer
@given(before=st.lists(some_text, min_size=1, max_size=3), chunk=some_text, special=st.booleans())
def test_a_prompt_given_as_its_own_prefix_says_whether_the_tokenizer_adds_to_it(tokens, before, chunk, special):
    prompt = BlendPrompt(*before, Chunk(chunk), "where?", add_special_tokens=special)
    tokenized = tokens(prompt)
    assert tokenized.ids[: tokenized.spans[0][0]] == tokens.prefix_ids(prompt)


def test_a_template_without_bos_stays_without_it():
    tokens = TOKENIZERS["bos"]
    prompt = BlendPrompt("Answer from these.\n", Chunk("the fox"), add_special_tokens=False)
    assert tokens.prefix_ids(prompt.prefix) == [0, *tokens.prefix_ids(prompt)]


def test_a_chunk_without_a_prefix_is_encoded_behind_a_sink():
    assert TOKENIZERS["bos"].sink_ids == [0]
    assert TOKENIZERS["smollm2"].sink_ids == [TOKENIZERS["smollm2"].tokenizer.eos_token_id]


@pytest.mark.parametrize("name", ["bos", "bos and eos", "space always", "space first"])
@pytest.mark.parametrize("special", [True, False])
def test_a_bos_that_a_chat_template_rendered_is_not_doubled(name, special):
    tokens = TOKENIZERS[name]
    prefix = "<s><|im_start|>system\nAnswer from these.\n"
    ids = tokens.prefix_ids(prefix)
    assert ids == tokens.tokenizer.encode(prefix, add_special_tokens=False)
    prompt = tokens(BlendPrompt(prefix, Chunk("the fox"), "where?", add_special_tokens=special))
    assert prompt.ids[: prompt.spans[0][0]] == ids


# Threads.


@pytest.mark.parametrize("name", ["smollm2", "space first"])
def test_threads_may_tokenise_text_and_chunks_at_once(name):
    tokens = TOKENIZERS[name]
    text = "a <|im_end|> b </s> the fox " * 20
    as_chunk, as_text = tokens.chunk_ids(text), tokens.text_ids(text)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: (tokens.chunk_ids if n % 2 else tokens.text_ids)(text), range(80)))
    assert all(ids == (as_chunk if n % 2 else as_text) for n, ids in enumerate(found))


@every_tokenizer
def test_whoever_uses_the_tokenizer_itself_meanwhile_is_not_disturbed(tokens):
    tokens.chunk_ids("a <|im_end|> b")
    assert not tokens.tokenizer.backend_tokenizer.encode_special_tokens  # a switch that all its users share
