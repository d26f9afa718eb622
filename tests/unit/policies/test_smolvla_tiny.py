"""The tiny SmolVLA with fresh weights: sizes, what enters its language model, names, saving, demonstrations, RL."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes.smolvla import seen
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vlarl.cli import main
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.source.load import load_config
from vlarl.data.demo_set import DemoSet
from vlarl.data.finetune import demo_statistics
from vlarl.data.tabletop_demos import TABLETOP
from vlarl.decisions import Sampling
from vlarl.envs.tabletop.geometry import PROPRIO_HIGH, PROPRIO_LOW
from vlarl.envs.tabletop.tasks import SUITES, get_suite
from vlarl.errors import UsageError
from vlarl.policies.load import describe_checkpoint, load_policy
from vlarl.policies.smolvla import tiny
from vlarl.policies.smolvla.policy import SmolVLAPolicy
from vlarl.types import Observation

INIT = "init:tiny-smolvla"


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def policy(seed: int = 0, **sizes: int) -> SmolVLAPolicy:
    made = tiny.init_tiny_smolvla(seed, **sizes)
    made.use_scalings(tiny.unit_scalings(made.config))
    return made.eval()


def observations(count: int, num_images: int = 1) -> list[Observation]:
    rng = np.random.default_rng(0)
    return [
        Observation(
            rng.integers(0, 256, (num_images, 56, 56, 3), dtype=np.uint8),
            rng.standard_normal(8).astype(np.float32),
            seen(i).instruction,
        )
        for i in range(count)
    ]


def test_the_saved_folder_is_small_and_its_expert_float32(tmp_path):
    made = policy()
    made.save(tmp_path, torch.bfloat16)
    assert 1e6 < sum(p.numel() for p in made.model.parameters()) < 4e6
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 8.5e6
    stored = load_file(tmp_path / "model.safetensors")
    kinds = {(name.startswith("model.vlm_with_expert.vlm."), tensor.dtype) for name, tensor in stored.items()}
    assert kinds == {(True, torch.bfloat16), (False, torch.float32)}


@pytest.mark.parametrize("name", [INIT, "builtin:tiny-smolvla"])
def test_lerobot_finds_what_it_reads_of_the_backbone(name, tmp_path):
    load_policy(name).save(tmp_path)
    backbone = tmp_path / "vlm"
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    assert tokenizer.fake_image_token_id == tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
    assert tokenizer.global_image_token_id == tokenizer.convert_tokens_to_ids("<global-img>")
    config = json.loads((backbone / "preprocessor_config.json").read_text())
    assert config["image_processor_type"] == "SmolVLMImageProcessor"


def test_a_saved_policy_acts_as_before(tmp_path):
    made = policy(num_images=2, chunk_length=6)
    made.save(tmp_path)
    loaded = load_policy(tmp_path)
    inputs, noise = made.process(observations(2, 2)), made.noise([3, 4], Sampling(0.0))
    ours, theirs = (each.act(each.sample(inputs, noise, Sampling(0.0))) for each in (made, loaded))
    assert np.shape(theirs) == (2, 6, 7) and np.array_equal(ours, theirs)
    assert describe_checkpoint(tmp_path).problems == ()


def test_the_name_gives_the_same_weights_every_time():
    first, second, other = policy(), load_policy(INIT), policy(seed=1)
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    assert not torch.equal(first.model.state_proj.weight, other.model.state_proj.weight)
    assert second.training_data.runs == () and load_policy(INIT, chunk_length=2).num_steps == 2


def test_doctor_describes_it(capsys):
    assert main(["doctor", "--model", INIT, "--num-images", "2"]) == 0
    said = capsys.readouterr().out
    assert INIT in said and "2 views" in said and "2,941,064" in said


def test_all_that_enters_the_language_model_has_the_same_std():
    made = policy()
    inputs = made.process(observations(16))
    context = made.model.embed_context(inputs.pixels, inputs.tokens)
    images, words = context[:, :16], context[:, 16:]
    state = made.model.state_proj(inputs.state)
    for entering in (images, words, state):
        assert 0.7 * tiny.STREAM < entering.std().item() < 1.3 * tiny.STREAM


def test_layers_move_the_states_of_the_language_model_by_a_good_part_of_their_size():
    """With residual branches of the usual size and states of width's square root, they would move them by a hundredth."""
    made = policy()
    inputs = made.process(observations(4))
    context = made.model.embed_context(inputs.pixels, inputs.tokens)
    layer = made.model.backbone.text_model.layers[0]
    positions = torch.arange(context.shape[1]).expand(4, -1)
    everything = torch.ones(4, context.shape[1], context.shape[1], dtype=torch.bool)
    moved = layer(context, positions, everything, None)[0] - context
    assert 0.1 < (moved.std() / context.std()).item() < 1.0


def test_patches_are_told_apart_by_more_than_their_mean_colour():
    kernels = policy().model.backbone.vision_model.embeddings.patch_embedding.weight
    centred = kernels - kernels.mean(dim=(2, 3), keepdim=True)
    assert (kernels.mean(dim=(2, 3)).std() / centred.std()).item() < 0.2 * 14**-1 + 1e-3


def test_every_word_of_the_tabletops_instructions_is_one_token():
    processor = policy().processor
    for suite in SUITES:
        for task in get_suite(suite).tasks:
            ids = processor.tokens_of(task.instruction)
            assert len(ids) == 2 + len(task.instruction.split()), task.instruction
            assert processor.tokenizer.id_to_token(ids[-1]) == "<0x0A>", "a newline ends it"
            assert processor.tokenizer.id_to_token(ids[0]) == "<s>"


def test_a_policy_without_the_robots_state_is_refused():
    with pytest.raises(UsageError, match="SmolVLA always reads the robot's state: leave policy.use_proprio out"):
        load_policy(INIT, use_proprio=False)
    with pytest.raises(UsageError, match=r"init:tiny-smolvla can't be made: 5 views: at most 4 are supported"):
        main_error(FinetuneConfig.model_validate({"policy": {"path": INIT, "num_images": 5}}))


def main_error(config: FinetuneConfig) -> None:
    from vlarl.data.finetune import fresh_policy

    class Source:
        action_dim, proprio_dim = 7, 8

    fresh_policy(config.policy, 0, Source())


def test_the_tabletops_statistics_are_its_bounds_and_what_was_measured():
    rng = np.random.default_rng(0)
    actions, proprio = rng.normal(0.2, 0.1, (40, 7)).astype(np.float32), rng.uniform(0, 1, (40, 8)).astype(np.float32)
    images, ids = np.zeros((40, 1, 8, 8, 3), np.uint8), np.zeros(40, np.int64)
    demos = DemoSet(TABLETOP, images, proprio, actions, ids, ("go",), np.array([40]), np.array([True]))
    found = demo_statistics(demos)
    assert found["action"]["q01"] == [-1.0] * 7 and found["action"]["mask"] == [True] * 6 + [False]
    assert found["proprio"]["q01"] == list(PROPRIO_LOW) and found["proprio"]["q99"] == list(PROPRIO_HIGH)
    np.testing.assert_allclose(found["action"]["mean"], actions.astype(np.float64).mean(axis=0))
    np.testing.assert_allclose(found["proprio"]["std"], proprio.astype(np.float64).std(axis=0))


def test_the_preset_trains_the_whole_model(tmp_path: Path):
    preset = load_config("tabletop_base_smolvla", schema=FinetuneConfig)
    assert preset.policy.path == INIT and preset.policy.train_backbone
    flags = [
        *("--run.root", str(tmp_path), "--run.name", "base", "--run.num_threads", "1", "--run.device", "cpu"),
        *("--demos.suites", "tabletop_spatial", "--demos.task_ids", "0", "--demos.episodes_per_task", "4"),
        *("--demos.num_workers", "1", "--optim.steps", "12", "--optim.batch_size", "8"),
        *("--optim.warmup_steps", "2", "--optim.log_interval", "4", "--optim.save_dtype", "float32"),
    ]
    assert main(["finetune", "tabletop_base_smolvla", *flags]) == 0
    final = tmp_path / "base" / "checkpoints" / "final"
    losses = [json.loads(line)["train/loss"] for line in (final.parents[1] / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.9 * losses[0]
    before, after = policy().model.state_dict(), load_policy(final).model.state_dict()
    still = {name.partition("text_model.")[2] for name in before if torch.equal(before[name], after[name])}
    unread = ("norm.", "layers.3.self_attn.q_proj.", "layers.3.self_attn.o_proj.", "layers.3.mlp.", "layers.3.post_")
    assert all(name.startswith(unread) for name in still), "only a critic reads what follows the last keys and values"
    scalings = load_policy(final).processor.scalings
    assert (scalings.state.stats["std"] < 0.6).all() and not torch.equal(scalings.action.stats["std"], torch.ones(7))
