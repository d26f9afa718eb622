import pytest
import torch

from vlarl.policies.openvla.text_families import PLAIN_PROMPT
from vlarl.policies.tiny import NUM_ACTION_BINS, init_tiny, tiny_config
from vlarl.policies.tiny_inputs import TEXT_VOCAB_SIZE, build_tiny_tokenizer


def encode(text: str) -> list[str]:
    return build_tiny_tokenizer().encode(PLAIN_PROMPT.format(instruction=text)).tokens


def test_common_instructions_take_one_token_a_word():
    words = "pick up the black bowl between the plate and the ramekin and place it on the plate"
    tokens = encode(words)
    assert tokens[:2] == ["<s>", "In: What action should the robot take to"]
    assert tokens[2:-1] == [f"▁{word}" for word in words.split()]
    assert tokens[-1] == "?\nOut:"


def test_any_text_can_be_encoded_and_comes_back():
    tokenizer = build_tiny_tokenizer()
    text = "grasp the zigzag café 方块 \t!"
    ids = tokenizer.encode(text).ids
    assert 0 not in ids  # no unknown token
    assert tokenizer.decode(ids) == text


def test_two_builds_are_equal_and_text_stays_below_the_action_ids():
    one, two = build_tiny_tokenizer(), build_tiny_tokenizer()
    assert one.to_str() == two.to_str()
    assert one.get_vocab_size() <= TEXT_VOCAB_SIZE
    config = tiny_config()
    assert config.first_action_id == TEXT_VOCAB_SIZE
    assert config.vocab_size == TEXT_VOCAB_SIZE + NUM_ACTION_BINS
    assert config.padded_vocab_size % config.pad_to_multiple_of == 0


def test_size_and_seeds():
    policy = init_tiny("parallel", seed=3)
    assert 2e6 < sum(p.numel() for p in policy.parameters()) < 4.2e6
    same, other = init_tiny("parallel", seed=3), init_tiny("parallel", seed=4)
    states = [p.state_dict() for p in (policy, same, other)]
    assert all(torch.equal(a, states[1][name]) for name, a in states[0].items())
    name = "model.projector.fc1.weight"
    assert not torch.equal(states[0][name], states[2][name])


def test_the_two_decoders_are_one_architecture():
    parallel, autoregressive = init_tiny("parallel"), init_tiny("autoregressive")
    autoregressive.load_state_dict(parallel.state_dict())
    assert parallel.chunk_length == 4
    assert autoregressive.chunk_length == 1


@pytest.mark.parametrize("decoder", ["parallel", "autoregressive"])
def test_every_trainable_weight_gets_a_gradient(decoder, observe):
    policy = init_tiny(decoder)
    inputs = policy.process([observe(0, "open the drawer")])
    ids = torch.full((1, policy.config.num_action_tokens), policy.codec.first_id + 5)
    policy.score(inputs, ids).logits.square().mean().backward()
    assert [n for n, p in policy.named_parameters() if p.requires_grad and p.grad is None] == []
    unused = [n for n, p in policy.named_parameters() if not p.requires_grad]
    assert {n.split(".")[3] for n in unused} == {"blocks", "norm", "attn_pool"}


def test_fresh_image_tokens_differ_by_position_more_than_they_agree():
    policy = init_tiny("parallel")
    pixels = torch.full((1, 1, 3, 56, 56), 90, dtype=torch.uint8)
    tokens = policy.model.embed_images(pixels)[0]
    shared = tokens.mean(dim=0)
    assert (tokens - shared).norm(dim=1).mean() > shared.norm()
