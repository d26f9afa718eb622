import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedConfig

from vlarl.policies.distribution import greedy
from vlarl.policies.openvla.config import KNOWN_TOWERS, parse_config, read_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.processor import PROMPT
from vlarl.policies.tiny import init_tiny, tiny_config


@pytest.fixture(params=["parallel", "autoregressive"])
def saved(request, tmp_path):
    policy = init_tiny(request.param, seed=2)
    policy.attach_value_head((16, 8), seed=2)
    policy.save(tmp_path / "checkpoint")
    return policy, tmp_path / "checkpoint"


def test_round_trip_is_equal_to_the_bit(saved, observe):
    policy, folder = saved
    loaded = OpenVLAPolicy.load(folder)
    ours, theirs = policy.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    inputs = policy.process([observe(0), observe(1, "open the drawer")])
    again = loaded.process([observe(0), observe(1, "open the drawer")])
    assert torch.equal(inputs.input_ids, again.input_ids)
    ids, logits = policy.generate(inputs, lambda lg, _: greedy(lg))
    scores = loaded.score(again, ids)
    assert torch.equal(scores.logits, policy.score(inputs, ids).logits)
    torch.testing.assert_close(scores.logits, logits, atol=1e-5, rtol=0)
    assert torch.equal(scores.values, policy.score(inputs, ids).values)
    trainable = [[n for n, p in x.named_parameters() if p.requires_grad] for x in (policy, loaded)]
    assert trainable[0] == trainable[1]
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])


def test_folder_has_the_original_layout_and_no_pickle(saved):
    _, folder = saved
    names = {p.name for p in folder.iterdir()}
    assert names == {
        "config.json",
        "dataset_statistics.json",
        "model.safetensors",
        "preprocessor_config.json",
        "proprio_projector.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "value_head.safetensors",
    }
    keys = set(load_file(folder / "model.safetensors"))
    assert {
        "vision_backbone.featurizer.blocks.0.ls1.scale_factor",
        "vision_backbone.fused_featurizer.attn_pool.latent",
        "projector.fc3.weight",
        "language_model.model.layers.2.self_attn.q_proj.weight",
        "language_model.lm_head.weight",
    } <= keys
    assert json.loads((folder / "config.json").read_text())["timm_model_ids"] == list(KNOWN_TOWERS)


def test_the_folders_tokenizer_loads_in_transformers(saved):
    policy, folder = saved
    tokenizer = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
    prompt = PROMPT.format(instruction="open the drawer")
    assert tuple(tokenizer(prompt).input_ids) == policy.processor.prompt_ids("open the drawer")


def test_saving_a_loaded_checkpoint_keeps_foreign_fields_and_files(saved, tmp_path):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hf_llm_id": "meta-llama/Llama-2-7b-hf"}))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 2048}')
    OpenVLAPolicy.load(folder).save(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["hf_llm_id"] == "meta-llama/Llama-2-7b-hf"
    assert (tmp_path / "again/tokenizer_config.json").read_text() == '{"model_max_length": 2048}'


def test_sharded_weights_load_through_the_index(saved):
    policy, folder = saved
    state = load_file(folder / "model.safetensors")
    names = sorted(state)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: state[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    loaded = OpenVLAPolicy.load(folder).state_dict()
    assert all(torch.equal(t, loaded[n]) for n, t in policy.state_dict().items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        OpenVLAPolicy.load(folder)


def test_all_wrong_names_and_shapes_are_told_at_once(saved):
    _, folder = saved
    state = load_file(folder / "model.safetensors")
    del state["projector.fc1.bias"], state["language_model.lm_head.weight"]
    state["surplus"] = torch.zeros(1)
    state["projector.fc3.bias"] = torch.zeros(3)
    state["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)  # old files have it
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="don't fit") as error:
        OpenVLAPolicy.load(folder)
    text = str(error.value)
    for part in ("missing (2)", "projector.fc1.bias", "lm_head", "unexpected (1): surplus", "projector.fc3.bias (3,)"):
        assert part in text


def test_truncated_file_is_named(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        OpenVLAPolicy.load(folder)


def test_missing_weights_and_config_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        OpenVLAPolicy.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().raw))
    with pytest.raises(FileNotFoundError, match="no weights"):
        OpenVLAPolicy.load(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)


def test_dtype_and_critic_on_demand(saved):
    _, folder = saved
    loaded = OpenVLAPolicy.load(folder, dtype=torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.value_head.out.weight.dtype == torch.float32
    assert loaded.value_head.hidden_sizes == (16, 8)
    (folder / "value_head.safetensors").unlink()
    assert OpenVLAPolicy.load(folder).value_head is None
    assert OpenVLAPolicy.load(folder, value_head=(4,)).value_head.hidden_sizes == (4,)


def test_the_published_sizes_follow_from_a_bare_config():
    raw = {k: v for k, v in tiny_config().raw.items() if k not in ("timm_model_kwargs", "vlarl")}
    raw |= {"image_sizes": [224, 224], "text_config": {"model_type": "llama", "vocab_size": 32064}}
    config = parse_config(raw)
    assert [(t.embed_dim, t.depth, t.mlp_dim, t.num_patches) for t in config.towers] == [
        (1024, 24, 4096, 256),
        (1152, 27, 4304, 256),
    ]
    assert (config.decoder, config.chunk_length, config.prompt_suffix_id) == ("autoregressive", 1, 29871)
    assert (config.first_action_id, config.vocab_size) == (31744, 32000)
    with torch.device("meta"):
        policy = OpenVLAPolicy(config, None)
    assert sum(p.numel() for p in policy.model.parameters()) == 7_541_237_184


def test_config_errors_name_the_remedy():
    raw = tiny_config().raw
    with pytest.raises(ValueError, match="vit_tiny.*known are"):
        parse_config({**raw, "timm_model_ids": ["vit_tiny", "vit_so400m_patch14_siglip_224"]})
    with pytest.raises(ValueError, match="timm_model_kwargs.*windows"):
        parse_config({**raw, "timm_model_kwargs": [{"windows": 3}, {}]})
    with pytest.raises(ValueError, match="lacks text_config"):
        parse_config({k: v for k, v in raw.items() if k != "text_config"})
    with pytest.raises(ValueError, match="decoder 'beam' is unknown"):
        tiny_config().with_decoder("beam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one action a call"):
        tiny_config("autoregressive", chunk_length=4)


def test_dataset_statistics_win_over_the_config(saved):
    _, folder = saved
    action = {"q01": [0.0] * 7, "q99": [2.0] * 7}
    (folder / "dataset_statistics.json").write_text(json.dumps({"tabletop": {"action": action}}))
    np.testing.assert_allclose(OpenVLAPolicy.load(folder).unnormalize(np.ones(7)), 2.0, atol=1e-6)
