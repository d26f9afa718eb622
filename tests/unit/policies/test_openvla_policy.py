"""Both decoders against themselves: batches against rows, generation against scoring, positions, values."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes.float_error import check_gradients, exactly, gradients_of, logit_judge, value_judge

from vlarl.policies import distribution
from vlarl.policies.openvla.decoders import embed_prefix
from vlarl.policies.openvla.policy import OpenVLAPolicy
from vlarl.policies.tiny import init_tiny, initialize, tiny_config

INSTRUCTIONS = ["open the drawer", "pick up the red cube", "put the zigzag bowl on the plate and close the drawer"]


@pytest.fixture(params=["parallel", "autoregressive"])
def policy(request) -> OpenVLAPolicy:
    policy = init_tiny(request.param, seed=1)
    policy.attach_value_head((32,), seed=1)
    torch.nn.init.normal_(policy.value_head.out.weight)
    return policy


def greedy(logits: torch.Tensor, _: int) -> torch.Tensor:
    return distribution.greedy(logits)


def test_rows_of_a_ragged_batch_equal_rows_alone(policy, observe):
    observations = [observe(i, text) for i, text in enumerate(INSTRUCTIONS)]
    together = policy.process(observations)
    assert not together.attention_mask.all()
    ids, logits = policy.decode(together, greedy)
    scores = policy.score(together, ids)
    for i, observation in enumerate(observations):
        alone = policy.process([observation])
        row = slice(i, i + 1)
        own_ids, own_logits = policy.decode(alone, greedy)
        assert torch.equal(own_ids, ids[row])
        for found in (own_logits, logits[row], scores.logits[row]):
            logit_judge(policy, alone, ids[row]).check(found)
        for found in (policy.score(alone, ids[row]).values, scores.values[row], policy.values(together)[row]):
            value_judge(policy, alone).check(found)


def test_score_gives_the_logits_that_generation_saw(policy, observe):
    inputs = policy.process([observe(i, text) for i, text in enumerate(INSTRUCTIONS)])
    uniforms = torch.rand(3, policy.config.num_action_tokens, generator=torch.Generator().manual_seed(0))

    def choose(logits: torch.Tensor, first: int) -> torch.Tensor:
        return distribution.sample(logits, 1.6, uniforms[:, first : first + logits.shape[1]])

    ids, logits = policy.decode(inputs, choose)
    assert ids.min() >= policy.codec.first_id
    assert ids.max() < policy.codec.first_id + 256
    logit_judge(policy, inputs, ids).check(logits)


def test_value_and_logits_ignore_padding(policy, observe):
    inputs = policy.process([observe(0)])
    ids, _ = policy.decode(inputs, greedy)
    logits, values = logit_judge(policy, inputs, ids), value_judge(policy, inputs)
    for fill in (3, 7, 500):  # whatever the padding contains, and however wide it is
        pad = torch.full((1, 5), fill)
        padded = replace(
            inputs,
            input_ids=torch.cat([inputs.input_ids, pad], dim=1),
            attention_mask=torch.cat([inputs.attention_mask, pad > 1000], dim=1),
        )
        after = policy.score(padded, ids)
        values.check(after.values)
        logits.check(after.logits)


def test_value_reads_the_state_that_predicts_the_first_token(policy, observe):
    inputs = policy.process([observe(0), observe(1, INSTRUCTIONS[2])])
    ids, logits = policy.decode(inputs, greedy)
    prefix = embed_prefix(policy.model, inputs, policy.proprio_projector)
    states = policy.decoder.states(policy.model, prefix, ids)
    judge = logit_judge(policy, inputs, ids)
    for found in (logits[:, 0], policy.model.action_logits(states[:, 0])):
        replace(judge, exact=judge.exact[:, 0]).check(found)
    value_judge(policy, inputs).check(policy.value_head(states[:, 0]))


def test_tokens_matter_to_the_autoregressive_decoder_and_not_to_the_parallel_one(policy, observe):
    inputs = policy.process([observe(0)])
    count = policy.config.num_action_tokens
    low = torch.full((1, count), policy.codec.first_id)
    high = low.clone()
    high[:, 0] += 200
    one, two = policy.score(inputs, low).logits, policy.score(inputs, high).logits
    assert torch.equal(one[:, 0], two[:, 0])
    changed = (one[:, 1:] - two[:, 1:]).abs().max() > 1e-3
    assert changed == (policy.config.decoder == "autoregressive")


def test_prompt_sees_later_slots_only_in_the_parallel_decoder(observe):
    short, long = (init_tiny("parallel", seed=1, chunk_length=k) for k in (1, 4))
    inputs = short.process([observe(0)])
    ids = torch.full((1, 28), short.codec.first_id)
    first = [p.score(inputs, ids).logits[:, 0] for p in (short, long)]
    assert (first[0] - first[1]).abs().max() > 1e-4


def test_image_proprio_and_instruction_all_reach_the_logits(policy, observe):
    base = policy.process([observe(0)])
    ids, logits = policy.decode(base, greedy)
    other = policy.process([observe(1, INSTRUCTIONS[0])])
    for changed in (
        replace(base, pixels=other.pixels),
        replace(base, proprio=other.proprio),
        replace(base, input_ids=other.input_ids, attention_mask=other.attention_mask),
    ):
        assert (policy.score(changed, ids).logits - logits).abs().max() > 1e-3


def test_second_image_is_read(observe):
    policy = init_tiny("parallel", seed=0, num_images=2)
    inputs = policy.process([observe(0, num_images=2)])
    ids, logits = policy.decode(inputs, greedy)
    pixels = inputs.pixels.clone()
    pixels[:, 1] = 0
    assert (policy.score(replace(inputs, pixels=pixels), ids).logits - logits).abs().max() > 1e-3


def test_generation_takes_no_gradient_and_reports_token_offsets(policy, observe):
    offsets = []

    def choose(logits: torch.Tensor, first: int) -> torch.Tensor:
        offsets.append((first, logits.shape[1]))
        return distribution.greedy(logits)

    _, logits = policy.decode(policy.process([observe(0)]), choose)
    assert not logits.requires_grad
    expected = [(0, 28)] if policy.config.decoder == "parallel" else [(t, 1) for t in range(7)]
    assert offsets == expected


def test_gradients_of_a_ragged_batch_equal_the_sum_of_rows(policy, observe):
    observations = [observe(i, text) for i, text in enumerate(INSTRUCTIONS)]
    ids = torch.full((3, policy.config.num_action_tokens), policy.codec.first_id + 9)
    places = ids - policy.codec.first_id

    def gradients(scoring: OpenVLAPolicy, *parts: list[int]) -> dict[str, torch.Tensor]:
        scoring.zero_grad()
        for rows in parts:
            logits = scoring.score(policy.process([observations[i] for i in rows]), ids[rows]).logits
            distribution.token_logprobs(logits, places[rows], 1.6).sum().backward()
        return gradients_of(scoring)

    exact = exactly(policy, lambda p: gradients(p, [0], [1], [2]))
    check_gradients(gradients(policy, [0, 1, 2]), exact, gradients(policy, [0], [1], [2]))


def test_predict_action_gives_a_chunk_in_robot_units(policy, observe):
    observation = observe(0)
    actions = policy.predict_action(observation.images[0], observation.instruction, observation.proprio)
    assert actions.shape == (policy.chunk_length, 7)
    ids, _ = policy.decode(policy.process([observation]), greedy)
    np.testing.assert_allclose(actions, policy.codec.decode(ids.numpy())[0], atol=1e-6)
    with pytest.raises(ValueError, match="give proprio"):
        policy.predict_action(observation.images, observation.instruction)


def test_values_without_a_critic_say_how_to_get_one(observe):
    policy = init_tiny("parallel")
    with pytest.raises(ValueError, match="attach_value_head"):
        policy.values(policy.process([observe(0)]))


def test_value_head_is_decided_by_its_seed():
    weights = [init_tiny("parallel").attach_value_head((8,), seed=s).layers[0].weight for s in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_bfloat16_policy_scores_in_float32(observe):
    policy = init_tiny("parallel", seed=1)
    inputs = policy.process([observe(0), observe(1)])
    ids, exact = policy.decode(inputs, greedy)
    policy.attach_value_head((8,))
    policy.model.bfloat16()
    policy.proprio_projector.bfloat16()
    scores = policy.score(inputs, ids)
    assert scores.logits.dtype == scores.values.dtype == torch.float32
    assert (scores.logits - exact).abs().max() < 0.05


def test_grouped_heads_run(observe):
    config = tiny_config("parallel")
    grouped = replace(config, text={**config.text, "num_key_value_heads": 1})
    policy = OpenVLAPolicy(grouped, init_tiny().tokenizer)
    initialize(policy, torch.Generator().manual_seed(0))
    ids, logits = policy.decode(policy.process([observe(0)]), greedy)
    logit_judge(policy, policy.process([observe(0)]), ids).check(logits)


def test_learned_slots_at_zero_are_ofts_zeros(observe):
    learned = init_tiny("parallel", seed=1)
    zeros = init_tiny("parallel", seed=1, learned_slots=False)
    inputs = learned.process([observe(0), observe(1, INSTRUCTIONS[2])])
    ids, logits = zeros.decode(inputs, greedy)
    assert (learned.score(inputs, ids).logits - logits).abs().max() > 1e-3
    with torch.no_grad():
        learned.model.language_model.model.embed_tokens.weight[learned.config.vocab_size :] = 0
    logit_judge(zeros, inputs, ids).check(learned.score(inputs, ids).logits)


def test_more_learned_slots_than_padding_rows_are_refused():
    with pytest.raises(ValueError, match="70 learned slots, but the embedding has 64"):
        tiny_config("parallel", chunk_length=10)
