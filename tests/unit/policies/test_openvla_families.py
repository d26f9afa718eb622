"""Conventions of the language models: prompts, special ids, and where the action ids are."""

import copy
import json

import pytest
import torch
from fakes.float_error import FloatJudge, exactly

from vlarl.policies.openvla.actions import UniformActionCodec
from vlarl.policies.openvla.config import OpenVLAConfig, parse_config
from vlarl.policies.openvla.decoders import AutoregressiveDecoder, embed_prefix
from vlarl.policies.openvla.inputs import OpenVLAInputs
from vlarl.policies.openvla.model import OpenVLAModel
from vlarl.policies.tiny import tiny_config


def config(backbone: str, text: dict, **native) -> OpenVLAConfig:
    raw = {"vision_backbone_id": "dinosiglip-vit-so-224px", "llm_backbone_id": backbone, "text_config": text}
    return parse_config({**raw, "vlarl": native})


@pytest.mark.parametrize(
    ("backbone", "text", "ids"),
    [
        ("llama2-7b-pure", {"vocab_size": 32064}, (31744, 31999)),
        ("mistral-v0.1-7b-pure", {"vocab_size": 32064}, (31744, 31999)),
        # tokenizer of 151643 + 22 special + 256 extra tokens, padded to 151936
        ("qwen25-0_5b-extra", {"vocab_size": 151936}, (151665, 151920)),
        ("qwen25-7b-pure", {"vocab_size": 152064}, (151387, 151642)),
    ],
)
def test_action_ids_of_published_models(backbone, text, ids):
    found = config(backbone, text)
    assert (found.first_action_id, found.vocab_size - 1) == ids
    codec = UniformActionCodec(found.vocab_size, found.num_action_bins, 1)
    assert codec.encode([[-1.0]]).tolist() == [ids[1]]
    assert codec.encode([[1.0]]).tolist() == [ids[0]]


def test_other_vocabularies_say_where_their_actions_end():
    text = {"model_type": "qwen2", "vocab_size": 512}
    with pytest.raises(
        ValueError, match="151387..151642 exceed the vocabulary's 512 rows: say .* vocab_size under 'vlarl'"
    ):
        config("", text)
    found = config("", text, vocab_size=400)
    assert (found.first_action_id, found.vocab_size) == (144, 400)
    assert parse_config(json.loads(json.dumps(found.to_json()))).vocab_size == 400


@pytest.mark.parametrize(
    ("backbone", "kind"),
    [
        ("llama2-7b-pure", "llama"),
        ("vicuna-v15-7b", "llama"),
        ("mistral-v0.1-7b-pure", "mistral"),
        ("qwen25-0_5b-extra", "qwen2"),
    ],
)
def test_the_backbones_id_stands_for_the_models_kind(backbone, kind):
    assert config(backbone, {"vocab_size": 151936}).text["model_type"] == kind


def test_an_unknown_kind_is_told():
    with pytest.raises(ValueError, match="'phi' is not supported; known are llama, mistral, qwen2"):
        config("phi-2-3b", {"vocab_size": 51264})


def test_prompts_and_special_ids_are_the_originals():
    llama, mistral = (config(f"{name}-pure", {"vocab_size": 32064}) for name in ("llama2-7b", "mistral-v0.1-7b"))
    for found in (llama, mistral):
        assert found.prompt_template == "In: What action should the robot take to {instruction}?\nOut:"
        assert (found.bos_id, found.prompt_suffix_id, found.pad_token_id, found.stop_id) == (1, 29871, 32000, 2)
    vicuna = config("vicuna-v15-7b", {"vocab_size": 32064})
    assert vicuna.prompt_template.startswith("A chat between a curious user and an artificial intelligence assistant. ")
    assert vicuna.prompt_template.endswith(" USER: What action should the robot take to {instruction}? ASSISTANT:")
    qwen = config("qwen25-0_5b-extra", {"vocab_size": 151936, "bos_token_id": 151643})
    assert qwen.prompt_template.endswith("to {instruction}?<|im_end|>\n<|im_start|>assistant\n")
    assert (qwen.bos_id, qwen.prompt_suffix_id, qwen.pad_token_id, qwen.stop_id) == (None, None, 151643, 151645)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_small_model_of_each_kind_scores_like_the_library(kind):
    """The whole row as the original lays it out: first token, image tokens, the rest, the action so far."""
    raw = dict(tiny_config("autoregressive", use_proprio=False).raw)
    text = {**raw["text_config"], "model_type": kind, "num_attention_heads": 4, "num_key_value_heads": 2}
    text = {**text, "tie_word_embeddings": kind == "qwen2", "hidden_size": 32, "intermediate_size": 48}
    raw = {**raw, "text_config": text, "vlarl": {**raw["vlarl"], "vocab_size": 1024}}
    torch.manual_seed(0)
    model = OpenVLAModel(parse_config(raw))
    ids = torch.tensor([[9, 300, 301], [8, 303, 304]])
    pixels = torch.randint(0, 256, (2, 1, 3, 56, 56), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    tokens = torch.randint(768, 1024, (2, 7), generator=torch.Generator().manual_seed(1))
    prefix = embed_prefix(model, OpenVLAInputs(ids, torch.ones_like(ids, dtype=torch.bool), pixels, None), None)
    ours = model.action_logits(AutoregressiveDecoder(7).states(model, prefix, tokens))

    library = type(model.language_model)(model.language_model.config)
    library.load_state_dict(model.language_model.state_dict(), strict=False)

    def theirs(whole: OpenVLAModel) -> torch.Tensor:
        reader = copy.deepcopy(library).to(whole.dtype)
        embed = reader.get_input_embeddings()
        row = [embed(ids[:, :1]), whole.embed_images(pixels), embed(ids[:, 1:]), embed(tokens[:, :-1])]
        return reader(inputs_embeds=torch.cat(row, dim=1), use_cache=False).logits[:, -7:, 768:1024]

    FloatJudge.of(exactly(model, theirs), theirs(model)).check(ours)
