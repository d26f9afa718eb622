"""vLLM with language and vision-language models: the texts and log-probs of the policy, over the whole vocabulary."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_process import FLOAT32, RemoteEngine
from fakes.syncing import all_weights, sync
from fakes.text_judge import check_texts, judges, library_logits
from fakes.vlm_models import END, IDS, observation, video_observation, write_model

from vlarl.config.schema import LoraConfig, ModelConfig, VllmConfig
from vlarl.decisions import Sampling
from vlarl.errors import UsageError, VlarlError
from vlarl.policies.vlm.checkpoint import read_policy
from vlarl.policies.vlm.generation import restrict
from vlarl.rollout.engines.sleep import Sleep
from vlarl.rollout.engines.vllm import VllmEngine
from vlarl.weights.stream import is_adapter_weight, weights_to_send

FACTOR = 4.0  # of the error that float32 itself makes over the whole vocabulary
TIED = {"qwen2_5_vl": True, "qwen3_vl": False, "qwen2": False, "llama": False, "qwen3": True}
WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl")
ENDS = Sampling(1.0, max_tokens=9, stop=tuple(range(60)))


class Served:
    """A tiny model, its folder and its engine, which has its weights when a test begins."""

    def __init__(self, engines, folder, kind):
        self.folder = write_model(kind, folder, wide=True, tied=TIED[kind])
        self.policy = read_policy(self.folder)
        self.engine: RemoteEngine = engines.start(kind, str(self.folder), {**FLOAT32, "prefix_caching": True})
        self.kind = kind

    def inputs(self, count=9):
        """Prompts without images, with one and with three; of videos, too, where the model reads them."""
        counts = (0, 1, 3) if self.kind in WITH_IMAGES else (0,)
        seen = [observation(f"say {'so ' * (i % 4)}{i}", counts[i % len(counts)], i) for i in range(count)]
        if self.kind in WITH_IMAGES:
            seen[1], seen[4] = (video_observation("then?", i, fps=32.0) for i in range(2))
        return self.policy.process(seen)

    def greedy(self, inputs, sampling):
        return self.policy.sample(inputs, self.policy.noise(range(len(inputs)), sampling), sampling)


@pytest.fixture(scope="module")
def served(engines, tmp_path_factory):
    root, known = tmp_path_factory.mktemp("texts"), {}

    def get(kind):
        if kind not in known:
            known[kind] = Served(engines, root / kind, kind)
        found = known[kind]
        if found.engine.version:
            sync(found.engine, all_weights(found.policy), 0)
        return found

    return get


def rows_of(decisions):
    return [ids[mask].tolist() for ids, mask in zip(decisions.sample.ids, decisions.mask, strict=True)]


@pytest.mark.parametrize("kind", TIED)
def test_log_probs_and_greedy_texts_are_the_policys(served, kind):
    """Prompts of several lengths with 0, 1 and 3 images and videos; float64 judges the log-probs."""
    given = served(kind)
    inputs = given.inputs()
    for temperature in (1.0, 0.6):
        found = given.engine.generate(inputs, replace(ENDS, temperature=temperature), range(9))
        check_texts(given.policy, inputs, found, temperature, FACTOR)
        assert len(set(found.sample.length.tolist())) > 1, "texts of several lengths"
    greedy = Sampling(0.0, max_tokens=12)
    found = given.engine.generate(inputs, greedy, range(9))
    assert rows_of(found) == rows_of(given.greedy(inputs, greedy))
    check_texts(given.policy, inputs, found, 0.0, FACTOR)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llama"])
def test_what_sampling_leaves_out_does_not_change_log_probs(served, kind):
    """Tokens are those that top-k, top-p and the minimum leave, by our own rule; log-probs those of all tokens."""
    given, temperature = served(kind), 1.3
    inputs = given.inputs()
    stop = (*range(120), END)
    sampling = Sampling(temperature, top_p=0.8, top_k=6, max_tokens=8, min_tokens=3, stop=stop[:-1])
    found = given.engine.generate(inputs, sampling, range(9))
    check_texts(given.policy, inputs, found, temperature, FACTOR)
    with torch.no_grad():
        logits = library_logits(given.policy, inputs, found)
    index = found.mask.cumsum(dim=1)[found.mask] - 1
    logits[index < 3] = logits[index < 3].index_fill(-1, torch.tensor(stop), -torch.inf)
    logits = logits.index_fill(-1, torch.tensor(given.policy.access.placeholders, dtype=torch.int64), -torch.inf)
    kept = restrict(logits, sampling)
    assert kept.gather(1, found.sample.ids[found.mask][:, None]).isfinite().all()
    assert int(kept.isfinite().sum(dim=1).max()) <= 6
    restricted = (kept / temperature).log_softmax(-1).gather(1, found.sample.ids[found.mask][:, None])[:, 0]
    judge, _ = judges(given.policy, inputs, found, temperature)
    assert judge.problem(restricted), "log-probs of the restricted distribution are others"
    assert int(found.sample.length.min()) == 4


def test_a_text_ends_with_its_stop_token_or_is_cut_off(served):
    given = served("llama")
    inputs = given.inputs(40)
    found = given.engine.generate(inputs, ENDS, range(40))
    for tokens, stopped in zip(rows_of(found), found.sample.stopped.tolist(), strict=True):
        assert not {*ENDS.stop, END} & set(tokens[:-1])
        assert stopped == (tokens[-1] in {*ENDS.stop, END}) and (stopped or len(tokens) == 9)
    at_the_limit = [len(tokens) == 9 and s for tokens, s in zip(rows_of(found), found.sample.stopped, strict=True)]
    assert not found.sample.stopped.all() and any(at_the_limit), "also with the last token that it may have"
    assert not found.sample.ids[~found.mask].any() and not found.engine_logprobs[~found.mask].any()
    assert found.version.tolist() == [0] * 40


def test_a_stop_string_ends_a_text_as_in_the_torch_engine(served):
    given, tokenizer = served("llama"), served("llama").policy.processor.tokenizer
    inputs, free = given.inputs(), Sampling(0.0, max_tokens=12)
    texts = [tokenizer.decode(row) for row in rows_of(given.greedy(inputs, free))]
    strings = tuple(text[4:6] for text in texts[:4] if "�" not in text[4:6])
    assert strings
    for least in (0, 8):
        stopping = replace(free, stop_strings=strings, min_tokens=least)
        expected, found = given.greedy(inputs, stopping), given.engine.generate(inputs, stopping, range(9))
        assert rows_of(found) == rows_of(expected)
        assert found.sample.stopped.tolist() == expected.sample.stopped.tolist()
        assert found.sample.stopped.any() or least
        check_texts(given.policy, inputs, found, 0.0, FACTOR)
    following = given.engine.generate(inputs, free, range(9))
    assert rows_of(following) == rows_of(given.greedy(inputs, free)), "nothing of an ended request is left"


def test_a_row_depends_on_its_own_seed_whatever_the_batch(served):
    given = served("qwen3_vl")
    inputs, seeds = given.inputs(5), [11, 2**63 + 5, 13, 14, 15]
    together = given.engine.generate(inputs, ENDS, seeds)
    turned = given.engine.generate(inputs.rows(torch.arange(4, -1, -1)), ENDS, seeds[::-1])
    assert rows_of(turned)[::-1] == rows_of(together)
    alone = given.engine.generate(inputs.rows(slice(1, 2)), ENDS, seeds[1:2])
    assert rows_of(alone)[0] == rows_of(together)[1]


@torch.no_grad()
def disturb(policy, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        scale = 0.1 * parameter.abs().mean().clamp(min=1e-3)
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "qwen3"])
def test_after_a_sync_log_probs_are_those_of_the_new_weights(served, kind):
    """All weights of both towers, the embedding that is the output layer, too, and both caches in use."""
    given = served(kind)
    inputs, learner = given.inputs(), read_policy(given.folder)
    for version in (1, 2):
        disturb(learner, version)
        sync(given.engine, weights_to_send(learner, torch.float32), version)
        found = given.engine.generate(inputs, ENDS, range(9))
        check_texts(learner, inputs, found, 1.0, FACTOR)
        judge, _ = judges(given.policy, inputs, found, 1.0)
        assert judge.problem(found.engine_logprobs[found.mask]), "those of the old weights are others"
        assert found.version.tolist() == [version] * 9


def test_placeholders_of_images_are_never_sampled(served):
    """The output layer is synced with a large logit for them, so that they would be the likeliest tokens."""
    given = served("qwen3_vl")
    inputs, learner = given.inputs(), read_policy(given.folder)
    places = torch.tensor(learner.access.placeholders)
    likely = given.greedy(inputs, Sampling(0.0, max_tokens=1)).sample.ids[0, 0]
    with torch.no_grad():
        head = learner.model.get_output_embeddings().weight
        head[places] = 3 * head[likely]
    sync(given.engine, all_weights(learner), 1)
    for sampling in (Sampling(0.0, max_tokens=4), Sampling(1.0, max_tokens=4)):
        found = given.engine.generate(inputs, sampling, range(9))
        assert not torch.isin(found.sample.ids, places).any()
        check_texts(learner, inputs, found, sampling.temperature, FACTOR)
        assert float(found.engine_logprobs[0, 0]) < -1, "the likeliest tokens are others"


TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj", "qkv", "proj", "gate_proj")  # in both towers, packed and not


@pytest.mark.parametrize("target", TARGETS)
def test_adapters_are_sent_and_kept_as_adapters(engines, served, target):
    """One kind of layer after the other: what a sync brings to it changes the log-probs, as in the learner."""
    given, lora = served("qwen2_5_vl"), {"enabled": True, "rank": 3, "alpha": 6, "target_modules": TARGETS}
    if target == TARGETS[0]:
        engines.start("text adapters", str(given.folder), FLOAT32, lora)
    engine, learner = RemoteEngine(engines, "text adapters"), read_policy(given.folder)
    learner.prepare_training(ModelConfig(), LoraConfig(**lora), seed=1)
    inputs = given.inputs()
    generator, touched = torch.Generator().manual_seed(0), set()
    with torch.no_grad():
        for name, parameter in learner.named_parameters():
            if ".lora_B." in name and f".{target}." in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
                touched.add("visual" in name)
    assert touched == {"q_proj": {False}, "v_proj": {False}, "qkv": {True}, "proj": {True}}.get(target, {False, True})
    stream = weights_to_send(learner, torch.float32)
    assert all(map(is_adapter_weight, stream.shapes))
    sync(engine, stream, 1)
    found = engine.generate(inputs, ENDS, range(9))
    check_texts(learner, inputs, found, 1.0, FACTOR)
    judge, _ = judges(given.policy, inputs, found, 1.0)
    assert judge.problem(found.engine_logprobs[found.mask]), "without the adapter they are others"


# What is refused


def test_a_prompt_that_is_too_long_is_refused(served):
    given = served("llama")
    with pytest.raises(
        UsageError, match=r"prompt 0 has \d+ tokens, and a text may have 4090: .*4096 together.*max_model_len"
    ):
        given.engine.generate(given.inputs(1), Sampling(1.0, max_tokens=4090), [0])


@pytest.mark.parametrize(
    ("kind", "says"),
    [("smolvlm", "processed images of qwen2_5_vl, .* not of smolvlm"), ("mixtral", "mixture of experts")],
)
def test_models_that_vllm_is_not_given_are_refused(tmp_path, kind, says):
    folder = write_model(kind, tmp_path / kind, wide=True)
    with pytest.raises(UsageError, match=f"{says}.*vllm.num_engines 0"):
        VllmEngine(read_policy(folder, device="meta"), VllmConfig(), torch.float32)


def test_a_video_that_vllm_counts_differently_is_refused(served):
    """Qwen2.5-VL: two seconds are eight positions of time, its frames have fewer tokens on a side."""
    given = served("qwen2_5_vl")
    inputs = given.policy.process([observation("so"), video_observation("then?", fps=1.0)])
    with pytest.raises(UsageError, match=r"prompt 1 has a video .*vllm.num_engines 0"):
        given.engine.generate(inputs, ENDS, [0, 1])
    given.engine.generate(inputs.rows(slice(0, 1)), ENDS, [0])
    videos = served("qwen3_vl").policy.process([video_observation("then?", fps=1.0)])
    found = served("qwen3_vl").engine.generate(videos, ENDS, [0])
    check_texts(served("qwen3_vl").policy, videos, found, 1.0, FACTOR)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: ids.masked_fill(ids == IDS["<|image_pad|>"], 5), r"prompt 1 has 0 tokens for \d+ features"),
        (lambda ids: ids.roll(40, dims=1), r"prompt 1 has .*misplace"),
    ],
)
def test_tokens_that_do_not_fit_the_images_are_refused(served, change, says):
    given = served("qwen2_5_vl")
    inputs = given.policy.process([observation("so"), observation("and", 3, seed=1)])
    with pytest.raises(VlarlError, match=says):
        given.engine.generate(replace(inputs, ids=change(inputs.ids)), ENDS, [0, 1])


class ExpandingEngine:
    """Stands in for vLLM's engine: reads a token more than a prompt has, as one that expands placeholders itself."""

    def __init__(self):
        self.requests = []

    def add_request(self, name, prompt, params):
        self.requests.append(SimpleNamespace(request_id=name, prompt_token_ids=[*prompt["prompt_token_ids"], 7]))

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        ended, self.requests = self.requests, []
        for request in ended:
            request.finished, request.outputs = True, [SimpleNamespace(token_ids=[END], logprobs=[])]
        return ended


def test_other_prompt_tokens_than_the_policys_are_an_error(served):
    given = served("llama")
    engine = object.__new__(VllmEngine)
    super(VllmEngine, engine).__init__({})
    engine._model, engine._sampling_options = given.policy.vllm_model("vlarl"), given.policy.sampling_options
    engine._worker_temperature = 1.0
    engine._sleep = Sleep(None, enabled=False)
    engine._llm = SimpleNamespace(
        llm_engine=ExpandingEngine(), model_config=SimpleNamespace(max_model_len=99), get_weight_version=lambda: "0"
    )
    with pytest.raises(VlarlError, match="vLLM has read other tokens than those of prompt 0"):
        engine.generate(given.inputs(2), ENDS, [0, 1])
