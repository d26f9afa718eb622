"""Names and values of other systems: what each sets, and the advice for those that set nothing."""

import re
from pathlib import Path

import pytest

from vlarl.config import Config, ConfigError, FinetuneConfig, load_config
from vlarl.config.describe import options
from vlarl.config.source import aliases, finetune_aliases
from vlarl.config.source.aliases import ALIASES, ELSEWHERE, MEANINGS, NEEDLESS, TRANSLATED, advice_for, names_only
from vlarl.config.source.flags import parse_flags
from vlarl.config.source.spelling import RECIPES, SYNONYMS, respelled, suite_name

KNOWN = frozenset(options(Config))
KNOWN_TO_FINETUNE = frozenset(options(FinetuneConfig))
SEED_OPTIONS = [
    line.split()[1]
    for line in (Path(__file__).parents[1] / "seed_options.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
]


def values(*tokens: str, schema=Config) -> dict[str, object]:
    flags = parse_flags(tokens, schema)
    assert flags.problems == [] and flags.positionals == []
    return flags.values


def advice(*tokens: str, schema=Config) -> str:
    flags = parse_flags(tokens, schema)
    assert flags.values == {} and flags.positionals == []
    return "; ".join([str(problem) for problem in flags.problems] + flags.notes)


# Every name


@pytest.mark.parametrize("name", ALIASES)
def test_every_alias_sets_its_option_with_underscores_and_with_hyphens(name):
    path = ALIASES[name]
    schema = Config if path in KNOWN else FinetuneConfig
    option = options(schema)[path]
    text = option.choices[0] if option.choices else "true" if option.is_flag else "1"
    for spelled in {f"--{name}", f"--{name.replace('_', '-')}"}:
        found = values(spelled, text, schema=schema)
        assert list(found) == [path]
        assert values(f"{spelled.removeprefix('--')}={text}", schema=schema) == found


def test_every_target_is_an_option():
    known = KNOWN | KNOWN_TO_FINETUNE
    assert {path for path in [*ALIASES.values(), *finetune_aliases.ALIASES.values()] if path not in known} == set()
    assert {path for found in TRANSLATED.values() for path in found.options if path not in KNOWN} == set()
    assert {path for path in SYNONYMS if path not in KNOWN} == set()


def test_a_name_is_in_one_table_and_is_no_option_of_ours():
    tables = [ALIASES, TRANSLATED, NEEDLESS, ELSEWHERE]
    names = [name for table in tables for name in table]
    shared = {name for name in names if names.count(name) > 1}
    assert shared == {"data_root_dir", "dataset_path"}  # set in finetune, refused with advice in train
    assert set(names) & KNOWN == set()
    assert all(name == aliases.plain_name(name) for name in names)


@pytest.mark.parametrize("name", [*NEEDLESS, *ELSEWHERE])
def test_sentences_name_options_that_exist(name):
    sentence = NEEDLESS.get(name) or ELSEWHERE[name]
    named = {word.strip(",;:.()'`") for word in sentence.split() if word.startswith("--")}
    own = {"--resume", "--out", "--dtype", "--push-to-hub", "--dry-run"}
    known = {f"--{path}" for path in KNOWN | KNOWN_TO_FINETUNE}
    assert named - own <= known, named - own - known


@pytest.mark.parametrize("name", SEED_OPTIONS)
def test_every_option_of_the_seeds_is_set_or_has_advice(name):
    for spelled in (name, name.replace("_", "-")):
        flags = parse_flags([f"--{spelled}=1"], Config)
        said = [str(problem) for problem in flags.problems] + flags.notes
        assert flags.values or said
        assert not any("unknown option" in text for text in said)


# Translations


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("--gpu 1", {"run.device": "cuda:1"}),
        ("--gpu_id 0", {"run.device": "cuda:0"}),
        ("--secondary-gpu-id 1", {"policy.heads_device": "cuda:1"}),
        ("--num_gpus 1", {}),
        ("--bf16", {"policy.dtype": "bfloat16"}),
        ("--bf16 True", {"policy.dtype": "bfloat16"}),
        ("--no-bf16", {"policy.dtype": "float32"}),
        ("--bf16=false", {"policy.dtype": "float32"}),
        ("--load_in_4bit", {"policy.quantize": 4}),
        ("--load-in-8bit False", {"policy.quantize": None}),
        ("--cliprange 0.1", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
        ("--clip-range 0.1", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1}),
        ("--report_to wandb", {"logging.wandb": True}),
        ("--report_to none", {"logging.wandb": False, "logging.tensorboard": False}),
        ("--report_to=[wandb,tensorboard]", {"logging.wandb": True, "logging.tensorboard": True}),
        ("trainer.logger=['console','wandb']", {"logging.wandb": True}),
        ("--output_dir results/first", {"run.root": "results", "run.name": "first"}),
        ("--output-dir first", {"run.root": ".", "run.name": "first"}),
        ("--scale_rewards", {"algorithm.normalize_std": True}),
        ("--scale_rewards none", {"algorithm.normalize_std": False}),
        ("--scale_rewards batch", {"algorithm.normalize_std": False, "algorithm.normalize_advantages": "scale"}),
        ("--num_tasks_per_suite 3", {"env.task_ids": (0, 1, 2)}),
        ("--disable_training_ckpt", {"checkpoint.interval": 0}),
        ("--disable_training_ckpt False", {}),
        ("--use_kl_loss", {"kl.place": "loss"}),
        ("--use_kl_loss false", {"kl.place": "reward"}),
        ("--freeze_vla_backbone", {"policy.freeze": "backbone"}),
        ("--load_l1_action_head --use_tokenized_actions", {"policy.actions": "hybrid"}),
        ("--use_tokenized_actions False", {"policy.actions": "l1"}),
        ("--deterministic_eval", {"eval.temperature": 0.0}),
        ("--use_flash_attention", {"policy.attention": "flash_attention_2"}),
        ("--high_entropy_mask 0.2", {"algorithm.entropy_top_fraction": 0.2}),
        ("--optim.betas 0.7 0.6 --adam_beta2 0.99", {"optim.betas": (0.7, 0.99)}),
        ("--adam_beta1 0.8 --adam_beta2 0.99", {"optim.betas": (0.8, 0.99)}),
        ("data.accuracy_lower_bound=0.1 data.accuracy_upper_bound=0.9", {"rollout.accuracy_bounds": (0.1, 0.9)}),
        ("actor_rollout_ref.model.vla=openvla-oft", {"policy.decoder": "parallel"}),
        ("actor_rollout_ref.model.lora_rank=0", {}),
        ("+actor_rollout_ref.model.lora_rank=8", {"lora.enabled": True, "lora.rank": 8}),
        ("trainer.test_freq=-1 trainer.save_freq=20", {"eval.interval": 0, "checkpoint.interval": 20}),
        ("trainer.nnodes=1 trainer.n_gpus_per_node=1", {}),
        ("trainer.wandb_mode=disabled", {"logging.wandb": False}),
        ("--no-wandb", {"logging.wandb": False}),
        ("--model tiny", {"policy.path": "init:tiny-oft"}),
        ("--model org/model", {"policy.path": "org/model"}),
        ("--task-id 4", {"env.task_ids": (4,)}),
        ("--push_to_hub False", {}),
        ("--n-iterations 3", {"run.iterations": 3}),
        ("--lora", {"lora.enabled": True}),
        ("--no-lora", {"lora.enabled": False}),
        ("algorithm=ppo", {"algorithm.name": "ppo"}),
        ("--tasks 0 1", {"env.task_ids": (0, 1)}),
        ("--tasks 0,1", {"env.task_ids": (0, 1)}),
        ("--task 3", {"env.task_ids": (3,)}),
        ("--task libero_goal", {"env.suite": "libero_goal"}),
        ("--precision bf16", {"policy.dtype": "bf16"}),
        ("--quantization 4bit", {"policy.quantize": 4}),
        ("--quantization int8", {"policy.quantize": 8}),
        ("--quantization none", {"policy.quantize": None}),
        ("--nproc_per_node 1", {}),
        ("optim.lr=1e-4 env.task_ids=[0,1]", {"optim.lr": 1e-4, "env.task_ids": (0, 1)}),
    ],
)
def test_what_a_name_of_another_system_sets(tokens, expected):
    assert values(*tokens.split()) == expected


@pytest.mark.parametrize(
    ("source", "tokens", "bounds", "betas"),
    [
        ("simplevla_rl", "data.accuracy_lower_bound=0.2", (0.2, 0.9), (0.9, 0.95)),
        ("simplevla_rl", "data.accuracy_upper_bound=0.8", (0.1, 0.8), (0.9, 0.95)),
        (None, "--adam_beta1 0.8", (0.1, 0.9), (0.8, 0.999)),
        (None, "--adam_beta2 0.5 --adam_beta2 0.6", (0.1, 0.9), (0.9, 0.6)),
        (None, "--adam_beta1 0.8 --adam_beta2 0.99", (0.1, 0.9), (0.8, 0.99)),
        (None, "--rollout.accuracy_bounds null data.accuracy_lower_bound=0.2", (0.2, 1.0), (0.9, 0.999)),
    ],
)
def test_half_of_a_pair_leaves_the_other_half_as_the_file_has_it(tmp_path, source, tokens, bounds, betas):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "rollout: {accuracy_bounds: [0.1, 0.9], oversample: 1.5}\noptim: {betas: [0.9, 0.999]}\n", encoding="utf-8"
    )
    config = load_config(source or file, tokens.split())
    assert (config.rollout.accuracy_bounds, config.optim.betas) == (bounds, betas)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("--gpu 0,1", "--gpu 0,1: one process uses one GPU"),
        ("--num_gpus 4", "--distributed.learners_per_node 4"),
        ("--report_to swanlab", "--report_to swanlab: no tracker swanlab; there are --logging.wandb"),
        ("--bf16=maybe", "--bf16 maybe: must be true or false"),
        ("--cliprange", "--cliprange: needs a value"),
        ("--push_to_hub", "--push_to_hub: after training, with a separate command: `vlarl push"),
        ("--static_mixture a", "--curriculum.mode weighted"),
        ("--batch_size 8", "--optim.minibatches"),
        ("--max_steps 100", "--run.total_env_steps; --env.max_steps is the time limit of an episode"),
        ("actor_rollout_ref.actor.anything=1", "docs/coming-from.md"),
        ("--demos.path x", "--demos.path: unknown option; it is one of `vlarl finetune`"),
        ("--episodes 5", "--run.total_env_steps; evaluations have --eval.states_per_task episodes per task"),
        ("--grad-accum 4", "--grad-accum is not needed: a minibatch is split into passes"),
        ("--n_gpus_per_node 2", "--distributed.learners_per_node 2"),
        ("--quantization awq", "--policy.quantize 4 or --policy.quantize 8"),
        ("--dataset x", "`vlarl finetune --demos.path DIR`"),
        ("--debug", "--dry-run prints the resolved configuration"),
        ("--data_root_dir x", "RL reads no dataset; `vlarl finetune --demos.path DIR`"),
        ("--rollout.refill yes", "--rollout.refill yes: must be true or false; write --rollout.refill for true"),
    ],
)
def test_advice_for_names_without_a_counterpart(tokens, said):
    assert said in advice(*tokens.split())


def test_a_name_means_what_it_means_in_the_command():
    assert values("--data_root_dir", "x", schema=FinetuneConfig) == {"demos.path": "x"}
    assert values("--batch_size", "8", schema=FinetuneConfig) == {"optim.batch_size": 8}
    assert values("--steps", "8", schema=FinetuneConfig) == {"optim.steps": 8}
    said = advice("--num_generations", "8", schema=FinetuneConfig)
    assert said == "--num_generations: an option of `vlarl train`, where it is --rollout.group_size"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("--dataset_name x", "--dataset_name: set --demos.path to the folder of the dataset"),
        ("--max-epochs 3", "--max-epochs: set the length of training with --optim.steps"),
        ("--n-iterations 3", "--n-iterations: set the length of training with --optim.steps"),
        ("--gpus 2", "--gpus 2: for several GPUs write --distributed.backend ray --distributed.learners_per_node 2"),
        ("--gradient_accumulation_steps 4", "is split into passes of --optim.microbatch_size"),
        ("--top_p 0.9", "--top_p: an option of `vlarl train`, where it is --rollout.top_p"),
        ("--min_p 0.1", "--min_p: an option of `vlarl train` only"),
        ("--batch_sise 4", "did you mean --optim.batch_size?"),
        ("--env.suite libero_spatial", "--env.suite: unknown option; it is one of `vlarl train`"),
    ],
)
def test_advice_of_finetune(tokens, said):
    assert said in advice(*tokens.split(), schema=FinetuneConfig)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ("--dataset x", {"demos.path": "x"}),
        ("--task_suite_name libero_goal", {"demos.suites": ("libero_goal",)}),
        ("--tasks 0 1", {"demos.task_ids": (0, 1)}),
        ("--save_steps 50", {"checkpoint.interval": 50}),
        ("--gpus 1", {}),
    ],
)
def test_what_a_name_sets_in_finetune(tokens, expected):
    assert values(*tokens.split(), schema=FinetuneConfig) == expected


def test_advice_of_finetune_names_its_own_options():
    for sentence in finetune_aliases.ELSEWHERE.values():
        assert names_only(sentence, KNOWN_TO_FINETUNE), sentence
    for name in [*NEEDLESS, *ELSEWHERE, *TRANSLATED]:
        said = advice_for(name, KNOWN_TO_FINETUNE, "--") or ""
        assert names_only(said, KNOWN_TO_FINETUNE) or said.startswith("an option of `vlarl train`"), said


@pytest.mark.parametrize("name", MEANINGS)
def test_a_note_says_what_an_ambiguous_name_sets(name):
    flags = parse_flags([f"--{name}", "3"], Config)
    assert list(flags.values) == [ALIASES[name]] and flags.problems == []
    assert flags.notes == [f"--{name} sets --{ALIASES[name]}, {MEANINGS[name]}"]
    assert MEANINGS[name] in advice_for(name, KNOWN)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ("--use_wandb SECRET", "--use_wandb: is true or false, and takes no other value; the key is read from WANDB_"),
        ("--lora 16", "--lora: is true or false, and takes no other value; the rank is --lora.rank"),
        ("--rollout.refill often", "--rollout.refill: is true or false, and takes no other value; leave out"),
    ],
)
def test_a_word_after_a_switch_is_no_preset(tokens, said):
    flags = parse_flags(tokens.split(), Config)
    (problem,) = flags.problems
    assert str(problem).startswith(said) and flags.positionals == []
    assert "SECRET" not in str(problem)


@pytest.mark.parametrize("word", ["tabletop_grpo", "tabletop_grop", "mine.yaml", "./mine", "LIBERO-Goal", "ppo"])
def test_a_preset_a_file_or_a_suite_may_follow_a_switch(word):
    flags = parse_flags(["--lora", word], Config)
    assert (flags.values, flags.positionals, flags.problems) == ({"lora.enabled": True}, [word], [])


def test_flags_of_the_command_itself_may_have_been_meant():
    (problem,) = parse_flags(["--detatch"], Config, own=["--dry-run", "--detach"]).problems
    assert str(problem) == "--detatch: unknown option; did you mean --detach?"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gspo", "GSPO is --algorithm.name grpo --algorithm.ratio_level sequence --algorithm.aggregate sequence_mean"),
        ("DAPO", "DAPO is --algorithm.name grpo --rollout.refill"),
        ("drgrpo", "Dr. GRPO is --algorithm.name grpo --no-algorithm.normalize_std"),
        ("Dr-GRPO", "Dr. GRPO is"),
    ],
)
def test_recipes_that_are_options_of_an_algorithm(name, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(overrides=["--algo", name])


@pytest.mark.parametrize("text", [text for of_option in RECIPES.values() for text in of_option.values()])
def test_what_a_recipe_says_can_be_written(text):
    flags = text.partition(" is ")[2].partition(",")[0].split()
    load_config(overrides=flags)


def test_advice_for_a_value_in_the_place_of_a_section(tmp_path):
    path = tmp_path / "mine.yaml"
    for text, said in {
        "algorithm: ppo\n": "must be a section: options of algorithm below it, such as `name: ppo`",
        "lora: true\n": "such as `enabled: true`",
        "optim:\n  lr:1e-4\n": "must be a section: options of optim below it; write a space after the colon",
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(said)):
            load_config(path)


# Where lists end, and files


@pytest.mark.parametrize("source", ["tabletop_grpo", "mine.yaml"])
def test_a_list_ends_at_a_preset_a_file_and_an_override(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    flags = parse_flags(["--env.task_ids", "0", "1", source, "--lora.target_modules", "q_proj", "optim.lr=1"], Config)
    assert flags.positionals == [source] and flags.problems == []
    assert flags.values == {"env.task_ids": (0, 1), "lora.target_modules": ("q_proj",), "optim.lr": 1}


@pytest.mark.parametrize("name", ["--config", "--config_path", "--config-name"])
def test_a_flag_may_name_the_file(name):
    assert parse_flags([name, "mine.yaml"], Config).positionals == ["mine.yaml"]
    assert parse_flags([f"{name}=mine.yaml"], Config).positionals == ["mine.yaml"]


# Values


@pytest.mark.parametrize(
    ("written", "suite"),
    [("LIBERO_Spatial", "libero_spatial"), ("libero-goal", "libero_goal"), ("libero_long", "libero_10"), ("x", "x")],
)
def test_suites_in_any_spelling(written, suite):
    assert suite_name(written) == suite


@pytest.mark.parametrize(
    ("path", "written", "value"),
    [
        ("algorithm.name", "GRPO", "grpo"),
        ("algorithm.name", "gae", "ppo"),
        ("algorithm.name", "REINFORCE++", "reinforce_pp"),
        ("algorithm.name", "dapo", "dapo"),
        ("algorithm.aggregate", "token-mean", "token_mean"),
        ("algorithm.normalize_advantages", True, "batch"),
        ("distributed.sharding", "full-shard", "full"),
        ("policy.dtype", "bf16", "bfloat16"),
        ("kl.estimator", "low_var_kl", "k3"),
        ("optim.lr", "FAST", "FAST"),
        ("run.name", "GRPO", "GRPO"),
    ],
)
def test_values_in_the_spelling_of_the_schema(path, written, value):
    assert respelled(path, written, Config) == value


def test_spellings_count_in_files_and_in_python(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("algorithm: {name: PPO}\nenv: {suite: Tabletop-Goal}\nrollout: {group_size: 1}\n")
    config = load_config(path)
    assert (config.algorithm.name, config.env.suite) == ("ppo", "tabletop_goal")
    assert load_config(overrides={"env.suite": "TABLETOP_LONG"}).env.suite == "tabletop_long"


# Files of other systems


def test_names_of_other_systems_in_a_file_are_refused_with_vlarls(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(
        "learning_rate: 1e-4\nactor:\n  optim:\n    lr: 1e-5\n  global_batch_size: 64\noptim:\n  max_norm: 1\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    said = [str(problem) for problem in caught.value.problems]
    assert f"learning_rate = 0.0001 ({path}, line 1): unknown option; here it is optim.lr" in said
    assert any("unknown section; actor.optim.lr: here it is optim.lr; actor.global_batch_size: set" in s for s in said)


def test_dotted_keys_are_options_of_their_section(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("optim.lr: 1e-4\noptim:\n  weight_decay: 0.5\nenv.task_ids: [0, 1]\n")
    config = load_config(path)
    assert (config.optim.lr, config.optim.weight_decay, config.env.task_ids) == (1e-4, 0.5, (0, 1))
    path.write_text("optim.lr: 1e-4\noptim:\n  lr: 1e-5\n")
    with pytest.raises(ConfigError, match=r"optim.lr \(.*line 3\): already given in line 1"):
        load_config(path)


def test_advice_in_python():
    with pytest.raises(ConfigError, match="learning_rate = 0.1: unknown option; here it is optim.lr"):
        load_config(overrides={"learning_rate": 0.1})
    assert advice_for("beta", KNOWN) == "here it is kl.coef"


# The preset of a suite


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"env.suite": "libero_spatial"}, "Haozhan72/Openvla-oft-SFT-libero-spatial-traj1"),
        ({"env.suite": "libero_spatial", "policy.path": "init:tiny-oft"}, "init:tiny-oft"),
        ({"env.suite": "tabletop_goal"}, "builtin:tiny-openvla"),
        ({}, "builtin:tiny-openvla"),
    ],
)
def test_without_a_preset_the_suite_chooses_one(given, path):
    assert load_config(overrides=given).policy.path == path
