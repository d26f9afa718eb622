"""Describes a language or vision-language model from its small files and the headers of the large ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from vlarl.config.known import PROMPTS
from vlarl.json_files import read_object
from vlarl.policies import adapters
from vlarl.policies.family import Description, DtypeName, MemoryEstimate
from vlarl.policies.stored import adapter_facts, stored_weights
from vlarl.policies.vlm.checkpoint import empty_model, read_model, reads_images
from vlarl.policies.vlm.memory import (
    IMAGE_TOKENS,
    PROMPT_LENGTH,
    Sizes,
    estimate_lora_update,
    estimate_rollout,
)
from vlarl.policies.vlm.model import max_positions

NO_TOKENIZER = "missing: copy tokenizer.json or tokenizer.model of its base model into the folder"
NO_TEMPLATE = "missing: only plain texts can be prompts; add the chat_template.jinja of an instruction-tuned model"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class VlmDescription(Description):
    """Everything that is known about a language or vision-language model without loading it."""

    model: PreTrainedModel  # without weights
    reads_images: bool
    has_tokenizer: bool
    has_template: bool
    has_processor: bool

    @property
    def train_options(self) -> dict[str, str]:
        """The suite: the default one is a robot's."""
        return {"env.suite": PROMPTS, "prompts.path": "DATA.jsonl"}

    @property
    def prompt_length(self) -> int:
        """Tokens of a prompt that the estimates assume."""
        return PROMPT_LENGTH

    def model_facts(self, num_images: int | None) -> dict[str, str]:
        """Lines about what the model reads and writes, and its sizes."""
        sizes, positions = Sizes(self.model), max_positions(self.model.config)
        reads = "text and images" if self.reads_images else "text"
        facts = {
            "model": f"{type(self.model).__name__}, reads {reads}, writes texts",
            "language": f"{sizes.text.layers} layers of width {sizes.text.hidden}, {sizes.vocabulary} tokens",
            "positions": "any number" if positions is None else f"{positions} tokens of prompt and text",
        }
        if sizes.vision is not None:
            facts["vision"] = f"{sizes.vision.layers} layers of width {sizes.vision.hidden}"
            facts["images"] = f"any number; the estimates assume {IMAGE_TOKENS} tokens of a prompt"
        return facts

    def file_facts(self) -> dict[str, list[str]]:
        """Lines about tokenizer, template and processor."""
        facts = {
            "tokenizer": ["there" if self.has_tokenizer else NO_TOKENIZER],
            "template": ["there" if self.has_template else NO_TEMPLATE],
        }
        if self.reads_images:
            missing = "missing: copy preprocessor_config.json of its base model into the folder"
            facts["processor"] = ["there" if self.has_processor else missing]
        return facts

    def estimate_rollout(
        self, batch_size: int, dtype: DtypeName, quantize: Literal[4, 8] | None = None
    ) -> MemoryEstimate:
        """Memory for sampling texts for a batch of prompts."""
        return estimate_rollout(self.model, batch_size, dtype, quantize)

    def estimate_lora_update(
        self,
        microbatch_size: int,
        dtype: DtypeName,
        rank: int,
        gradient_checkpointing: bool,
        quantize: Literal[4, 8] | None = None,
    ) -> MemoryEstimate:
        """Memory for one pass of an update of adapters."""
        return estimate_lora_update(self.model, microbatch_size, dtype, rank, gradient_checkpointing, quantize)

    def to_json(self) -> dict[str, Any]:
        """The whole description as JSON."""
        sizes = Sizes(self.model)
        return {
            "path": self.path,
            "kind": self.kind,
            "adapter": None if self.adapter is None else asdict(self.adapter),
            "architecture": type(self.model).__name__,
            "reads_images": self.reads_images,
            "language": asdict(sizes.text) | {"vocab_size": sizes.vocabulary},
            "vision": None if sizes.vision is None else asdict(sizes.vision),
            "max_positions": max_positions(self.model.config),
            "stored": asdict(self.stored),
            "problems": list(self.problems),
            "has_tokenizer": self.has_tokenizer,
            "has_template": self.has_template,
        }


def describe(path: str, folder: Path) -> VlmDescription:
    """Describe the checkpoint or adapter that `path` names and `folder` holds."""
    adapter = adapter_facts(folder)
    base = folder if adapter is None else adapters.find_base(folder, None)[1]
    if adapter is not None:
        adapters.check_base(folder, adapter.base, adapters.fingerprint(base))
    problems: tuple[str, ...] = ()
    try:
        model = read_model(base, has_weights=False)
    except ValueError as error:
        model, problems = empty_model(base), (str(error),)
    has_images = bool(reads_images(read_object(base / "config.json")))
    return VlmDescription(
        path=path,
        kind="LoRA adapter" if adapter else "vision-language model" if has_images else "language model",
        adapter=adapter,
        stored=stored_weights(base),
        problems=problems,
        model=model,
        reads_images=has_images,
        has_tokenizer=any((base / name).is_file() for name in TOKENIZERS),
        has_template=_has_template(base),
        has_processor=any((base / name).is_file() for name in PROCESSORS),
    )


def _has_template(folder: Path) -> bool:
    files = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
    inside = (read_object(folder / name).get("chat_template") for name in files if (folder / name).is_file())
    return (folder / "chat_template.jinja").is_file() or any(inside)
