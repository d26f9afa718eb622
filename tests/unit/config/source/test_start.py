"""What a command line starts from: the preset or file that is named, or the preset that fits the options."""

import json
from pathlib import Path

import pytest

from vlarl.config import load_config
from vlarl.config.known import CHECKPOINT_SERIES, GROUP_METHODS, SUITES
from vlarl.config.problems import ConfigError
from vlarl.config.run_checkpoints import SMALL_BYTES, is_small_checkpoint
from vlarl.config.schema import Config
from vlarl.config.source.start import OF_CHECKPOINT, start_of

GRPO, PPO, TOY = "libero_spatial_grpo_oft", "libero_spatial_ppo_openvla", "tabletop_grpo"
PROMPTS = "prompts_grpo_3b"
OWN = {"policy.path": "me/mine"}


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "preset", "reason"),
    [
        ({}, TOY, "which is the default"),
        ({"env.suite": "tabletop_goal"}, TOY, "which is the default"),
        ({"env.suite": "LIBERO-Goal"}, GRPO, "chosen because env.suite is libero_goal"),
        (
            {"env.suite": "libero_10", "algorithm.name": "gae"},
            PPO,
            "chosen because env.suite is libero_10 and algorithm.name is ppo",
        ),
        ({"env.suite": "metaworld_mt10"}, "metaworld_grpo", "chosen because env.suite is metaworld_mt10"),
        ({"env.suite": "prompts_shapes"}, "prompts_grpo", "chosen because env.suite is prompts_shapes"),
        (
            {"env.suite": "prompts-arithmetic", "policy.path": "builtin:tiny-qwen2.5-vl"},
            "prompts_arithmetic_grpo",
            "chosen because env.suite is prompts_arithmetic",
        ),
        (
            {"env.suite": "prompts_arithmetic", "algorithm.name": "ppo"},
            "prompts_ppo",
            "chosen because env.suite is prompts_arithmetic and algorithm.name is ppo",
        ),
        (
            {"policy.path": "builtin:tiny-qwen2.5-vl"},
            "prompts_grpo",
            "chosen because policy.path is the built-in model for prompts",
        ),
        ({"env.suite": "prompts"}, PROMPTS, "chosen because env.suite is prompts"),
        (OWN | {"env.suite": "prompts_shapes"}, PROMPTS, "chosen because env.suite is prompts_shapes"),
        (OWN, GRPO, "chosen because policy.path is taken for a 7B model"),
        (OWN | {"env.suite": "libero_spatial"}, GRPO, "chosen because policy.path is taken for a 7B model"),
        (OWN | {"env.suite": "metaworld_mt10"}, GRPO, "chosen because policy.path is taken for a 7B model"),
        (
            OWN | {"algorithm.name": "PPO"},
            PPO,
            "chosen because policy.path is taken for a 7B model and algorithm.name is ppo",
        ),
        (
            {"policy.path": "builtin:tiny-oft", "env.suite": "libero_spatial"},
            TOY,
            "chosen because policy.path is a small model",
        ),
    ],
)
def test_the_preset_follows_from_policy_suite_and_algorithm(given, preset, reason):
    start = start_of(None, given)
    assert (start.source, start.reason) == (preset, reason)
    assert start.lines[0] == f"starts from the preset {preset}, {reason}"


def test_a_name_on_the_command_line_counts_before_all_else(work):
    (work / "mine.yaml").touch()
    assert start_of(TOY, OWN).lines == [f"starts from the preset {TOY}, named on the command line"]
    assert start_of("mine.yaml", OWN).lines == ["starts from the file mine.yaml, named on the command line"]


def test_an_own_checkpoint_of_full_size_is_trained_on_one_gpu_and_describes_itself():
    config, preset = load_config(None, OWN | {"env.suite": "libero_goal"}), load_config(GRPO)
    assert (config.policy.path, config.env.suite) == ("me/mine", "libero_goal")
    assert config.policy.dtype == "bfloat16" and config.policy.gradient_checkpointing and config.lora.enabled
    assert (config.optim, config.rollout, config.eval) == (preset.optim, preset.rollout, preset.eval)
    assert (config.policy.decoder, config.policy.chunk_length) == ("auto", None)
    assert (config.policy.num_images, config.policy.use_proprio) == (None, None)
    assert (config.policy.resize, config.policy.center_crop) == ("lanczos3", True), "LIBERO's images"
    elsewhere = load_config(None, OWN | {"env.suite": "tabletop_goal"}).policy
    assert (elsewhere.resize, elsewhere.center_crop) == (Config().policy.resize, Config().policy.center_crop)
    assert load_config(None, OWN | {"policy.decoder": "parallel"}).policy.decoder == "parallel"
    named = load_config(GRPO, OWN)
    assert (named.policy.decoder, named.policy.chunk_length) == ("parallel", 8), "who names a preset gets all of it"


@pytest.mark.parametrize(
    "algorithm", ["grpo", "rloo", "cpgd", "ppo", "reinforce", "reinforce_pp", "reinforce_baseline"]
)
def test_a_chosen_preset_fits_every_algorithm(algorithm):
    config = load_config(None, OWN | {"algorithm.name": algorithm})
    assert config.rollout.refill == (algorithm in GROUP_METHODS)


def test_what_the_files_may_not_say_is_said():
    (note,) = start_of(None, OWN).lines[1:]
    assert note.endswith("for such a checkpoint add --policy.decoder parallel")
    assert start_of(None, OWN | {"policy.decoder": "parallel"}).lines[1:] == []
    known = start_of(None, {"policy.path": CHECKPOINT_SERIES[GRPO]["libero_goal"]})
    assert known.lines[1:] == [] and known.left_out == (), "the preset describes it"
    assert start_of(None, {"policy.path": CHECKPOINT_SERIES[PPO]["libero_goal"]}).left_out == OF_CHECKPOINT


@pytest.mark.parametrize("preset", [GRPO, PPO, "libero_10_cluster"])
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object", "libero_goal", "libero_10"])
def test_a_preset_of_libero_is_for_each_of_its_suites(preset, suite):
    config = load_config(preset, {"env.suite": suite})
    series = CHECKPOINT_SERIES[GRPO if preset == "libero_10_cluster" else preset]
    assert (config.env.suite, config.policy.path) == (suite, series[suite])
    assert config.policy.unnorm_key is None and config.env.max_steps is None, "they follow from the suite"
    assert load_config(preset, {"env.suite": suite, "policy.path": "me/mine"}).policy.path == "me/mine"


@pytest.mark.parametrize("preset", CHECKPOINT_SERIES)
def test_a_series_begins_with_the_checkpoint_of_its_preset(preset):
    config = load_config(preset)
    assert CHECKPOINT_SERIES[preset][config.env.suite] == config.policy.path
    assert set(CHECKPOINT_SERIES[preset]) < set(SUITES)


def test_a_suite_without_a_checkpoint_of_the_series_is_refused():
    with pytest.raises(ConfigError, match=r"trained for libero_spatial, not for libero_90; name a checkpoint"):
        load_config(None, {"env.suite": "libero_90"})
    path = CHECKPOINT_SERIES[GRPO]["libero_spatial"]
    assert load_config(GRPO, {"env.suite": "libero_90", "policy.path": path}).env.suite == "libero_90", (
        "it was asked for"
    )


def checkpoint(folder: Path, num_bytes: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(num_bytes)  # which takes no space
    return folder


def adapter(folder: Path, base: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    return folder


def test_the_size_of_a_checkpoint_is_that_of_its_weights(work):
    small, large = checkpoint(work / "small", SMALL_BYTES - 1), checkpoint(work / "large", SMALL_BYTES)
    assert is_small_checkpoint(str(small)) and not is_small_checkpoint(str(large))
    with (small / "trainer.safetensors").open("wb") as file:
        file.truncate(SMALL_BYTES)
    assert is_small_checkpoint(str(small)), "the optimizer's state is not the model"
    assert is_small_checkpoint("init:tiny-oft") and not is_small_checkpoint("me/mine")
    for misspelt in ("nowhere", "./nowhere", "small/nowhere", "nowhere/at/all"):
        assert start_of(None, {"policy.path": misspelt}).source == TOY, "nothing of LIBERO is said of what is not there"


def test_an_adapter_is_as_large_as_its_base(work):
    small, large = checkpoint(work / "small", 1), checkpoint(work / "large", SMALL_BYTES)
    assert is_small_checkpoint(str(adapter(work / "a", str(small))))
    assert is_small_checkpoint(str(adapter(work / "b", "builtin:tiny-oft")))
    of_a_run = adapter(work / "of_a_run", "me/mine")
    (of_a_run / "config.json").write_text("{}")
    assert not is_small_checkpoint(str(of_a_run))
    for number, base in enumerate((str(large), "me/mine", None, str(work / "c0"))):
        assert not is_small_checkpoint(str(adapter(work / f"c{number}", base)))


def test_a_smolvla_of_real_size_is_not_taken_for_a_7b_model(work):
    """What is for OpenVLA-OFT would be refused when it is loaded, and the user gave none of it."""
    folder = checkpoint(work / "mine", SMALL_BYTES + 1)
    (folder / "config.json").write_text('{"type": "smolvla"}')
    named = ["lerobot/smolvla_libero", "me/my-SmolVLA@v2", "./mine", str(adapter(work / "a", "lerobot/smolvla_base"))]
    for path in named:
        given = {"policy.path": path, "env.suite": "libero_spatial"}
        assert start_of(None, given).lines == [
            f"starts from the preset {TOY}, chosen because policy.path is a small model"
        ]
        config, own = load_config(None, given), load_config(TOY).rollout.temperature
        assert config.rollout.temperature == own and not config.lora.enabled
        policy = config.policy.model_dump(exclude={"path"})
        assert policy == Config().policy.model_dump(exclude={"path"}), "none of the options of another checkpoint"
    assert start_of(None, {"policy.path": "smolvla/openvla-7b"}).source == GRPO, "an organisation is not a model"
    (folder / "config.json").write_text('{"type": "other"}')
    assert not is_small_checkpoint("mine")


def test_a_run_is_as_large_as_its_checkpoint(work):
    checkpoint(work / "runs" / "first" / "checkpoints" / "final", 1)
    (work / "runs" / "first" / "config.yaml").touch()
    assert start_of(None, {"policy.path": "first"}).source == TOY
    checkpoint(work / "elsewhere" / "second" / "checkpoints" / "final", SMALL_BYTES)
    (work / "elsewhere" / "second" / "config.yaml").touch()
    assert start_of(None, {"policy.path": "second", "run.root": "elsewhere"}).source == GRPO


def test_links_that_lead_nowhere_and_adapters_of_themselves_are_no_reason_to_fail(work):
    folder = work / "cut"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").symlink_to(work / "nothing")
    assert is_small_checkpoint(str(folder))
    own = work / "runs" / "loop"
    adapter(own / "checkpoints" / "final", "loop")
    (own / "config.yaml").touch()
    assert is_small_checkpoint("loop"), "its base is neither here nor on the hub, which loading it says"


def test_a_small_model_on_own_prompts_is_not_rounded(work):
    (work / "data.jsonl").write_text('{"prompt": "1 + 1", "solution": "2"}')
    data = {"env.suite": "prompts", "prompts.path": ["data.jsonl"]}
    small = load_config(None, data | {"policy.path": "builtin:tiny-qwen2.5-vl"})
    assert small.policy.dtype == "float32" and not small.policy.gradient_checkpointing and small.lora.enabled
    large = load_config(None, data)
    assert large.policy.dtype == "bfloat16" and large.policy.gradient_checkpointing and large.lora.enabled
    assert large.policy.path == load_config(PROMPTS).policy.path and large.rollout.max_tokens == 512
