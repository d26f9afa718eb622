"""Texts are those of the library's own `generate`, whatever a prompt's batch, and end where they are told to."""

import pytest
import torch
from fakes.float_error import exactly
from fakes.text_judge import check_texts, library_logits, media_of
from fakes.vlm_models import END, MIXTURES, MODELS, TEXT_ONLY, WITH_IMAGES, observation, video_observation
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from vlarl.decisions import Decisions, Sampling
from vlarl.policies.vlm.generation import DEFAULT_MAX_TOKENS, Stops, choose, restrict
from vlarl.rollout.engines.torch import TorchEngine

CPU = torch.device("cpu")
FACTOR = 4.0  # of the error that float32 itself makes over the whole vocabulary
WORDS = (
    "count",
    "the red cubes on the table",
    "a",
    "what is 12 + 30?",
    "é ü",
    "x " * 20,
    "left or right",
    "b\n\nc",
    "?",
    "go",
)
GREEDY = Sampling(0.0, max_tokens=12)
VIDEO = -1  # in place of a number of images


def prompts(counts, count=10):
    """Prompts of different lengths; `counts` are the images of each, in turn."""
    made = []
    for index in range(count):
        text, images = f"{WORDS[index % 10]} {index // 10 or ''}", counts[index % len(counts)]
        made.append(video_observation(text, index) if images == VIDEO else observation(text, images, index))
    return made


def greedy_texts_of_the_library(policy, observations):
    """[tokens] for each prompt alone, with nothing padded."""
    found = []
    for each in observations:
        inputs = policy.process([each])
        given = {} if inputs.mm_token_type_ids is None else {"mm_token_type_ids": inputs.mm_token_type_ids}
        ids = policy.model.generate(
            inputs.ids,
            attention_mask=inputs.attention_mask.long(),
            **given,
            **media_of(policy, inputs),
            do_sample=False,
            max_new_tokens=GREEDY.max_tokens,
            suppress_tokens=list(policy.access.placeholders) or None,
        )
        found.append(ids[0, inputs.ids.shape[1] :].tolist())
    return found


def rows_of(decisions):
    return [ids[mask].tolist() for ids, mask in zip(decisions.sample.ids, decisions.mask, strict=True)]


@pytest.mark.parametrize("kind", MODELS)
def test_greedy_texts_are_those_of_generate(shared, kind):
    """50 prompts with 0, 1 and 3 images and a video, as one batch that is padded, against each prompt alone in the
    library; and their log-probs against float64, of which the library's own float32 is as far."""
    policy = shared(kind)
    observations = prompts((0, 1, 3, VIDEO, 1) if kind in WITH_IMAGES else (0,), 50)
    inputs = policy.process(observations)
    assert len(set(inputs.lengths.tolist())) > 10
    found = policy.sample(inputs, policy.noise(range(50), GREEDY), GREEDY)
    assert rows_of(found) == greedy_texts_of_the_library(policy, observations)
    check_texts(policy, inputs, found, 0.0, FACTOR)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_greedy_texts_are_those_of_a_batch_that_the_library_pads(shared, kind):
    """With its own padding on the left; ours begins from padding on the right."""
    policy, observations = shared(kind), prompts((0,), 50)
    inputs = policy.process(observations)
    tokenizer = policy.processor.tokenizer
    rows = [{"input_ids": ids[mask].tolist()} for ids, mask in zip(inputs.ids, inputs.attention_mask, strict=True)]
    padded = tokenizer.pad(rows, padding_side="left", return_tensors="pt")
    ids = policy.model.generate(**padded, do_sample=False, max_new_tokens=GREEDY.max_tokens)
    texts = ids[:, padded["input_ids"].shape[1] :]
    found = rows_of(policy.sample(inputs, policy.noise(range(50), GREEDY), GREEDY))
    assert [row[: len(mine)].tolist() for row, mine in zip(texts, found, strict=True)] == found


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llama"])
def test_samples_are_those_of_the_restricted_distribution(shared, kind):
    """Top-k, top-p and the minimum, token by token: where the uniform falls in the sum of the probabilities that are
    left, by the library's own logits and warpers in float64."""
    policy, stop = shared(kind), tuple(range(150))
    sampling = Sampling(0.9, top_k=12, top_p=0.85, max_tokens=6, min_tokens=3, stop=stop)
    inputs = policy.process(prompts((0, 1) if kind in WITH_IMAGES else (0,), 20))
    noise = policy.noise(range(20), sampling)
    found = policy.sample(inputs, noise, sampling)
    with torch.no_grad():
        logits = exactly(policy, lambda exact: library_logits(exact, inputs, found))
        plain = (library_logits(policy, inputs, found) / 0.9).softmax(-1)
    whole = (logits / 0.9).softmax(-1)
    rows, steps = found.mask.nonzero().T
    early = (steps < 3)[:, None] & torch.isin(torch.arange(logits.shape[1]), torch.tensor([*stop, END]))
    logits = logits.masked_fill(early, -torch.inf)
    logits[:, list(policy.access.placeholders)] = -torch.inf
    for warper in (TemperatureLogitsWarper(0.9), TopKLogitsWarper(12), TopPLogitsWarper(0.85)):
        logits = warper(None, logits)
    sums = logits.softmax(-1).cumsum(-1)
    below = torch.nn.functional.pad(sums, (1, 0))
    chosen, uniforms = found.sample.ids[found.mask][:, None], noise.double()[rows, steps]
    kept = whole.masked_fill(logits.isinf(), 0.0).sum(-1).min()  # what the others are divided by
    slack = FACTOR * float((plain.cumsum(-1) - whole.cumsum(-1)).abs().max() / kept)
    assert slack < 1e-2
    assert (below.gather(1, chosen)[:, 0] - slack <= uniforms).all()
    assert (uniforms <= sums.gather(1, chosen)[:, 0] + slack).all()
    assert logits.gather(1, chosen).isfinite().all() and int(found.sample.length.min()) == 4


@pytest.mark.parametrize("kind", [*WITH_IMAGES, "llama", "qwen3_moe"])
def test_a_row_samples_the_same_alone_and_in_any_batch(shared, kind):
    policy, sampling = shared(kind), Sampling(1.0, max_tokens=10, stop=tuple(range(40)))
    observations = prompts((0, 1, 3) if kind in WITH_IMAGES else (0,))
    engine = TorchEngine(policy, CPU)
    seeds = [100 + i for i in range(10)]
    together = engine.generate(policy.process(observations), sampling, seeds)
    alone = [engine.generate(policy.process([o]), sampling, [s]) for o, s in zip(observations, seeds, strict=True)]
    assert len(set(together.mask.sum(dim=1).tolist())) > 2, "texts of several lengths"
    assert [rows_of(each)[0] for each in alone] == rows_of(together)
    assert [policy.act(each)[0] for each in alone] == policy.act(together)
    rejoined = Decisions.cat(alone)
    assert torch.equal(rejoined.mask, together.mask) and torch.equal(rejoined.sample.ids, together.sample.ids)
    torch.testing.assert_close(rejoined.engine_logprobs, together.engine_logprobs, rtol=1e-4, atol=1e-4)
    half = TorchEngine(policy, CPU, batch_size=4).generate(policy.process(observations), sampling, seeds)
    assert rows_of(half) == rows_of(together)


def test_a_text_ends_with_its_stop_token_which_counts(shared):
    policy, stop = shared("llama"), tuple(range(60))
    sampling = Sampling(1.0, max_tokens=8, stop=stop)
    inputs = policy.process(prompts((0,)))
    found = policy.sample(inputs, policy.noise(range(10), sampling), sampling)
    endings = {*stop, END}
    lengths = found.mask.sum(dim=1)
    assert torch.equal(lengths, found.sample.length) and bool((found.mask.cumprod(dim=1) == found.mask).all())
    for row, tokens in enumerate(rows_of(found)):
        assert not endings & set(tokens[:-1]), "nothing follows a stop token"
        assert bool(found.sample.stopped[row]) == (tokens[-1] in endings)
        assert found.sample.stopped[row] or len(tokens) == 8
        assert not found.sample.ids[row, len(tokens) :].any() and not found.engine_logprobs[row, len(tokens) :].any()
    assert found.sample.stopped.any() and not found.sample.stopped.all(), "some texts are cut off"
    assert not found.step.any() and found.mask.shape[1] == int(lengths.max())


def test_generation_ends_when_every_row_has_stopped(shared):
    policy = shared("qwen2")
    sampling = Sampling(1.0, max_tokens=200, stop=tuple(range(250)))
    found = policy.sample(policy.process(prompts((0,))), policy.noise(range(10), sampling), sampling)
    assert found.sample.stopped.all() and found.mask.shape[1] < 20


def test_no_stop_token_comes_before_the_minimum(shared):
    policy = shared("llama")
    inputs = policy.process(prompts((0,)))
    free, held = (Sampling(1.0, max_tokens=9, min_tokens=m, stop=tuple(range(200))) for m in (0, 5))
    short = policy.sample(inputs, policy.noise(range(10), free), free)
    long = policy.sample(inputs, policy.noise(range(10), held), held)
    assert int(short.sample.length.min()) < 5 and int(long.sample.length.min()) == 6
    assert not torch.isin(long.sample.ids[:, :5], torch.arange(200)).any()
    assert torch.isin(long.sample.ids[:, 5], torch.arange(200)).any(), "the sixth may be one"


def test_a_text_ends_where_a_stop_string_is_complete(shared):
    policy = shared("qwen2")
    inputs = policy.process(prompts((0,)))
    free = Sampling(0.0, max_tokens=12)
    whole = policy.sample(inputs, policy.noise(range(10), free), free)
    tokenizer = policy.processor.tokenizer
    texts = [tokenizer.decode(row) for row in rows_of(whole)]
    row, at = next(
        (row, at)
        for row, ids in enumerate(rows_of(whole))
        for at in range(4, len(ids) - 1)
        if "�" not in (string := tokenizer.decode(ids[at - 1 : at + 1])) and texts[row].index(string) >= at - 1
    )
    string = tokenizer.decode(rows_of(whole)[row][at - 1 : at + 1])
    stopping = Sampling(0.0, max_tokens=12, stop_strings=(string,))
    found = policy.sample(inputs, policy.noise(range(10), stopping), stopping)
    assert rows_of(found)[row] == rows_of(whole)[row][: at + 1] and bool(found.sample.stopped[row])
    assert str(policy.act(found)[row]).endswith(string), "it is a part of the text"
    for other, tokens in enumerate(rows_of(found)):
        if string not in texts[other]:
            assert tokens == rows_of(whole)[other]


def test_a_stop_string_may_begin_and_end_inside_tokens():
    pieces = ["ab", "cd", "ef", "</", "an", "swer>x"]
    stops = Stops((), ("</answer>",), lambda ids: "".join(pieces[i] for i in ids))
    assert [stops.reached(range(n)) for n in range(1, 7)] == [False] * 5 + [True]
    assert not stops.reached([3, 4, 5, 0]), "it was complete before"


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (0, 0.05), (20, 0.6), (1000, 0.999), (1, 1.0)])
def test_top_k_and_top_p_keep_what_the_library_keeps(top_k, top_p):
    logits = 3 * torch.randn(50, 200, generator=torch.Generator().manual_seed(1))
    temperature, expected = 0.7, logits
    for warper in (
        TemperatureLogitsWarper(temperature),
        *([TopKLogitsWarper(top_k)] if top_k else []),
        *([TopPLogitsWarper(top_p)] if top_p < 1 else []),
    ):
        expected = warper(None, expected)
    found = restrict(logits, Sampling(temperature, top_p=top_p, top_k=top_k))
    assert torch.equal(found.isfinite(), expected.isfinite())
    uniforms = torch.rand(50, generator=torch.Generator().manual_seed(2))
    chosen = choose(logits, uniforms, Sampling(temperature, top_p=top_p, top_k=top_k))
    assert expected.gather(1, chosen[:, None]).isfinite().all()


def test_samples_follow_the_restricted_distribution():
    """A chi-squared test of 20,000 samples against the renormalised probabilities."""
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])
    sampling = Sampling(0.8, top_k=4, top_p=0.95)
    probs = restrict(logits.double(), sampling).div(0.8).softmax(-1)[0]
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(3))
    counts = choose(logits.expand(20_000, -1), uniforms, sampling).bincount(minlength=5)
    kept = probs > 0
    assert not counts[~kept].any() and 1 < int(kept.sum()) < 5
    chi2 = ((counts[kept] - 20_000 * probs[kept]) ** 2 / (20_000 * probs[kept])).sum()
    assert chi2 < 16.3, "0.1% at three degrees of freedom"


@pytest.mark.parametrize("kind", WITH_IMAGES)
def test_placeholders_of_images_are_never_sampled(shared, kind):
    """With every other token forbidden by its logits, another one is still taken."""
    policy = shared(kind)
    assert len(policy.access.placeholders) == (1 if kind == "smolvlm" else 2)
    head = policy.model.get_output_embeddings()
    sampling = Sampling(0.0, max_tokens=3)
    inputs = policy.process(prompts((1,)))
    hook = head.register_forward_hook(
        lambda _, __, logits: logits.index_fill(-1, torch.tensor(policy.access.placeholders), 1e4)
    )
    found = policy.sample(inputs, policy.noise(range(10), sampling), sampling)
    hook.remove()
    assert not torch.isin(found.sample.ids, torch.tensor(policy.access.placeholders)).any()
    assert policy.evaluate(inputs, found, 1.0).logprobs.isfinite().all()


def test_noise_is_of_the_seed_alone_and_a_longer_limit_leaves_a_beginning_as_it_is(shared):
    policy = shared("qwen2")
    short, long = (policy.noise([7, 8], Sampling(max_tokens=m)) for m in (5, 50))
    assert torch.equal(short, long[:, :5]) and not torch.equal(short[0], short[1])
    assert policy.noise([8], Sampling()).shape == (1, DEFAULT_MAX_TOKENS)
    assert set(MODELS) == {*WITH_IMAGES, *TEXT_ONLY, *MIXTURES}
