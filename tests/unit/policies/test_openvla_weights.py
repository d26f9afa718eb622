import json
import os
import re
import stat
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.float_error import logit_judge
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedConfig

from vlarl.policies.distribution import greedy
from vlarl.policies.openvla.checkpoint import read_policy
from vlarl.policies.openvla.config import parse_config, read_config
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.openvla.text_families import PLAIN_PROMPT
from vlarl.policies.tiny import init_tiny, tiny_config
from vlarl.policies.weight_files import load_model, opened, save_module, save_weights, weight_files


@pytest.fixture(params=["parallel", "autoregressive"])
def saved(request, tmp_path):
    policy = init_tiny(request.param, seed=2)
    policy.attach_value_head((16, 8), seed=2)
    policy.save(tmp_path / "checkpoint")
    return policy, tmp_path / "checkpoint"


def test_round_trip_is_equal_to_the_bit(saved, observe):
    policy, folder = saved
    loaded = read_policy(folder)
    ours, theirs = policy.state_dict(), loaded.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    inputs = policy.process([observe(0), observe(1, "open the drawer")])
    again = loaded.process([observe(0), observe(1, "open the drawer")])
    assert torch.equal(inputs.input_ids, again.input_ids)
    ids, logits = policy.decode(inputs, lambda lg, _: greedy(lg))
    scores = loaded.score(again, ids)
    assert torch.equal(scores.logits, policy.score(inputs, ids).logits)
    logit_judge(loaded, again, ids).check(logits)
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
        "training_data.json",
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
    towers = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    assert json.loads((folder / "config.json").read_text())["timm_model_ids"] == towers


def test_the_folders_tokenizer_loads_in_transformers(saved):
    policy, folder = saved
    tokenizer = AutoTokenizer.from_pretrained(folder, config=PreTrainedConfig())
    prompt = PLAIN_PROMPT.format(instruction="open the drawer")
    assert tuple(tokenizer(prompt).input_ids) == policy.processor.prompt_ids("open the drawer")


def test_saving_a_loaded_checkpoint_keeps_foreign_fields_and_files(saved, tmp_path):
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hf_llm_id": "meta-llama/Llama-2-7b-hf"}))
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 2048}')
    read_policy(folder).save(tmp_path / "again")
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
    loaded = read_policy(folder).state_dict()
    assert all(torch.equal(t, loaded[n]) for n, t in policy.state_dict().items())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        read_policy(folder)


def test_an_index_of_other_files_is_told(saved):
    policy, folder = saved
    save_weights(policy.model.state_dict(), folder, max_shard_bytes=4_000_000)
    last = weight_files(folder)[-1]
    state = load_file(last)
    lost = sorted(state)[0]
    save_file({n: t for n, t in state.items() if n != lost}, last)
    with pytest.raises(
        ValueError, match=rf"names tensors that the files don't hold \(1\): {re.escape(lost)} in {last.name}"
    ):
        read_policy(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(ValueError, match="has no weight_map of file names"):
        read_policy(folder)


def test_all_wrong_names_and_shapes_are_told_at_once(saved):
    _, folder = saved
    state = load_file(folder / "model.safetensors")
    del state["projector.fc1.bias"], state["language_model.lm_head.weight"]
    state["surplus"] = torch.zeros(1)
    state["projector.fc3.bias"] = torch.zeros(3)
    state["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)  # old files have it
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match="don't fit") as error:
        read_policy(folder)
    text = str(error.value)
    for part in ("missing (2)", "projector.fc1.bias", "lm_head", "unexpected (1): surplus", "projector.fc3.bias (3,)"):
        assert part in text
    with torch.device("meta"):
        model = OpenVLAPolicy(read_config(folder), None).model
    with pytest.raises(ValueError, match="don't fit"):
        load_model(model, folder, torch.float32, "cpu")
    assert all(parameter.is_meta for parameter in model.parameters())  # refused by the headers, before any reading


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_the_weights_is_refused_at_once(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"model\.safetensors is not a file"), opened(path):
        pass


def test_truncated_file_is_named(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        read_policy(folder)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or corrupt"):
        read_policy(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_owns_its_memory(saved, dtype):
    policy, folder = saved
    loaded = read_policy(folder, dtype=dtype)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    for path in folder.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    before, after = policy.state_dict(), loaded.state_dict()
    assert all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in before)


def test_missing_weights_and_config_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().raw))
    with pytest.raises(FileNotFoundError, match="no weights"):
        read_policy(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ValueError, match="not valid JSON"):
        read_config(tmp_path)


def test_dtype_and_critic_on_demand(saved):
    _, folder = saved
    loaded = read_policy(folder, dtype=torch.bfloat16)
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.value_head.out.weight.dtype == torch.float32
    assert loaded.value_head.hidden_sizes == (16, 8)
    (folder / "value_head.safetensors").unlink()
    assert read_policy(folder).value_head is None
    assert read_policy(folder).attach_value_head((4,)).hidden_sizes == (4,)


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
    np.testing.assert_allclose(read_policy(folder).unnormalize(np.ones(7)), 2.0, atol=1e-6)


class Pair(nn.Module):
    """An embedding and a head, which may share one matrix."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        if tied:
            self.head.weight = self.embed.weight


def write(folder, **tensors):
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("present", [("embed.weight",), ("head.weight",), ("embed.weight", "head.weight")])
def test_one_of_two_tied_names_is_enough_and_the_tie_stays(present, tmp_path):
    matrix = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    steps = torch.tensor([2**40 + 1, 3])  # too large for bfloat16 to hold
    write(tmp_path, steps=steps, **{name: matrix.clone() for name in present})
    with torch.device("meta"):
        model = Pair(tied=True)
    load_model(model, tmp_path, torch.bfloat16, "cpu")
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, matrix.bfloat16())
    assert model.steps.tolist() == steps.tolist()
    with torch.device("meta"):
        apart = Pair(tied=False)
    if len(present) == 1:
        with pytest.raises(ValueError, match=r"missing \(1\)"):
            load_model(apart, tmp_path, torch.bfloat16, "cpu")


def test_the_flags_of_the_empty_model_are_kept(tmp_path):
    write(tmp_path, **{"embed.weight": torch.ones(6, 4), "head.weight": torch.ones(6, 4), "steps": torch.zeros(2)})
    with torch.device("meta"):
        model = Pair(tied=False)
    model.embed.weight.requires_grad_(False)
    load_model(model, tmp_path, torch.float32, "cpu")
    assert [model.embed.weight.requires_grad, model.head.weight.requires_grad] == [False, True]


def test_tied_tensors_are_written_once(tmp_path):
    model = Pair(tied=True)
    save_weights(model.state_dict(), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"embed.weight", "steps"}
    save_module(model, tmp_path / "pair.safetensors")
    assert set(load_file(tmp_path / "pair.safetensors")) == {"embed.weight", "steps"}
    again = Pair(tied=True)
    load_model(again, tmp_path, torch.float32, "cpu")
    assert torch.equal(again.head.weight, model.head.weight)


@pytest.mark.parametrize("max_shard_bytes", [50_000, 100_000, 10**9])  # the first is less than the largest tensor
def test_files_equal_those_of_transformers_byte_for_byte(max_shard_bytes, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, num_key_value_heads=4, **sizes)
    model = LlamaForCausalLM(config)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size=max_shard_bytes)
    ours.mkdir()
    save_weights(model.state_dict(), ours, max_shard_bytes=max_shard_bytes)
    written = {path.name: path.read_bytes() for path in ours.iterdir()}
    assert written == {path.name: path.read_bytes() for path in theirs.glob("*safetensors*")}
    config.save_pretrained(ours)
    read = LlamaForCausalLM.from_pretrained(ours).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in model.state_dict().items())


def test_sharded_and_single_load_alike_and_save_to_the_same_bytes(saved, tmp_path):
    policy, folder = saved
    single = (folder / "model.safetensors").read_bytes()
    save_weights(policy.model.state_dict(), folder, max_shard_bytes=2_000_000)
    assert len(weight_files(folder)) > 5
    assert not (folder / "model.safetensors").exists()  # the old single file is gone
    loaded = read_policy(folder)
    save_weights(loaded.model.state_dict(), folder)
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]  # so is the index
    assert (folder / "model.safetensors").read_bytes() == single
    save_weights(loaded.model.state_dict(), folder, torch.bfloat16)
    rounded = load_file(folder / "model.safetensors")
    assert all(torch.equal(rounded[n], t.bfloat16()) for n, t in policy.model.state_dict().items())


def test_one_shard_of_computed_tensors_is_held_at_a_time(tmp_path):
    alive: list[weakref.ref] = []
    most = 0

    def computed():
        nonlocal most
        for number in range(40):
            most = max(most, sum(ref() is not None for ref in alive))
            tensor = torch.full((1000,), float(number))
            alive.append(weakref.ref(tensor))
            yield f"t{number:02}", tensor
            del tensor

    save_weights(computed(), tmp_path, max_shard_bytes=5 * 4000)
    assert most <= 5
    files = weight_files(tmp_path)
    assert len(files) == 8
    values = {name: float(tensor[0]) for path in files for name, tensor in load_file(path).items()}
    assert values == {f"t{number:02}": number for number in range(40)}


def test_views_and_transposes_are_written(tmp_path):
    whole = torch.arange(12.0).view(3, 4)
    views = {"left": whole[:, :2], "top": whole[:2], "rest": whole[1:], "turned": whole.t()}
    save_weights(views, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], view) for name, view in views.items())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_files_have_the_mode_that_the_umask_sets(umask, mode, tmp_path):
    previous = os.umask(umask)
    try:
        for _ in range(2):  # new, and in place of an old one
            save_weights({"a": torch.ones(3)}, tmp_path)
            save_module(nn.Linear(2, 2), tmp_path / "head.safetensors")
    finally:
        os.umask(previous)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"model.safetensors": mode, "head.safetensors": mode}


MEASURE = """
import sys
from pathlib import Path

import torch
from torch import nn

from vlarl.policies.weight_files import load_model


def megabytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 5120, bias=False) for _ in range(12)))
    before = megabytes("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    load_model(model, Path(sys.argv[1]), dtype, "cpu")
    size = sum(p.nbytes for p in model.parameters()) / 2**20
    print(size, megabytes("VmHWM:") - before - size, megabytes("VmRSS:") - before - size)
    del model
"""


def test_loading_takes_no_more_than_a_shard_beside_the_model(tmp_path):
    tensors = ((f"{number}.weight", torch.full((5120, 1024), 0.5)) for number in range(12))  # 20 MiB each
    save_weights(tensors, tmp_path, max_shard_bytes=4 * 20 * 2**20)
    shard = max(path.stat().st_size for path in weight_files(tmp_path)) / 2**20
    assert len(weight_files(tmp_path)) == 3
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True)
    for line, expected in zip(done.stdout.splitlines(), (240, 120), strict=True):  # MiB as float32, as bfloat16
        size, peak, after = map(float, line.split())
        assert size == expected
        assert peak < 1.2 * shard, f"{peak:.0f} MiB beside the model, and the shard has {shard:.0f}"
        assert after < 0.1 * shard, f"{after:.0f} MiB stayed"
