"""What the tiny models read: the tokenizer, and the sizes of the tabletop's views, states and actions."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, Fuse
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import Unigram
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing

TEXT_VOCAB_SIZE = 768  # the most tokens; OpenVLA's action ids follow
ACTION_DIM = 7
PROPRIO_DIM = 8
IMAGE_SIZE = 56

PROMPT_PREFIX = "In: What action should the robot take to"
PROMPT_SUFFIX = "?\nOut:"
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
WORDS = (
    "the a an and or of to in into on onto from at by with it its them both that which is are near then while not "
    "pick up place put push pull turn open close lift move slide grasp grab take bring set stack reach touch rotate "
    "flip press pour drop hold release insert remove hang cover wipe sweep shake switch off out down over under above "
    "below behind beside between next front back left right middle center centre corner edge side top bottom inside "
    "outside around across toward towards away closest farthest nearest far upper lower first second third other "
    "another same red green blue yellow orange purple pink brown black white gray grey cyan magenta gold silver dark "
    "light small large big little tall short long wide round square flat empty full wooden metal plastic glass cube "
    "block ball sphere cylinder disc disk ring cone box bowl plate ramekin basket milk butter ketchup soup sauce "
    "cheese cream stove drawer cabinet wine bottle mug moka pot pan rack tray book caddy can juice pudding chocolate "
    "tomato alphabet salad dressing bbq cookie cookies frying kettle cup lid spoon fork knife table desk shelf "
    "microwave sink bin bag jar tin towel cloth paper pen pencil marker eraser toy car duck bear banana apple lemon "
    "lime pear peach carrot corn egg eggs bread donut cake rice beans popcorn cereal coffee tea water oil salt pepper "
    "sugar handle knob button lever door window wall floor target goal zone region area spot mark line row object "
    "objects thing item items one two three four five robot arm gripper hand compartment layer stand holder coaster "
    "mat board sponge hammer screwdriver wrench drill peg hole nut bolt"
)
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": "<unk>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "<pad>",
    "padding_side": "right",
    "clean_up_tokenization_spaces": False,
}
PIECES = ("s", "es", "ed", "ing", "er", "est", "ly", "▁un", "▁re", "'s")
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,'-_:;!?()/"


def build_tiny_tokenizer(
    special: Sequence[str] = SPECIAL_TOKENS, phrases: Sequence[str] = (PROMPT_PREFIX, PROMPT_SUFFIX)
) -> Tokenizer:
    """One token for each phrase, such as the sides of the prompt, and each common word; letters and bytes for the rest.

    Without phrases, a text begins with a word.
    """
    vocab: dict[str, float] = dict.fromkeys(special, 0.0)
    vocab |= {f"<0x{byte:02X}>": -20.0 for byte in range(256)}
    vocab |= dict.fromkeys(phrases, 0.0)
    # Scores rank the pieces: a whole word beats its parts, an ending beats its letters, letters beat bytes.
    vocab |= {character: -6.0 for character in ("▁", *CHARACTERS)}
    vocab |= {piece: -5.0 for piece in PIECES if piece not in vocab}
    vocab |= {f"▁{word}": -3.0 for word in WORDS.split()}
    if len(vocab) > TEXT_VOCAB_SIZE:
        raise ValueError(f"{len(vocab)} text tokens exceed the {TEXT_VOCAB_SIZE} ids below the action ids")
    tokenizer = Tokenizer(Unigram(list(vocab.items()), unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="never" if phrases else "first")
    tokenizer.decoder = DecoderSequence([ByteFallback(), MetaspaceDecoder(prepend_scheme="never"), Fuse()])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in phrases])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
