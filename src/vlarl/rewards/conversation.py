"""Prompts with responses as the tokens that a sequence classifier reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from jinja2 import TemplateError

from vlarl.errors import UsageError, VlarlError
from vlarl.rewards.pretrained import load_part
from vlarl.types import Prompt, message_text


class ConversationReader:
    """The tokenizer of a classifier, with its chat template if it has one."""

    def __init__(self, path: str, config: Any) -> None:
        """`config` is the classifier's, which is given the padding token."""
        self.path = path
        self.tokenizer = load_part(transformers.AutoTokenizer, path)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token is None:
            raise UsageError(f"reward.model: the tokenizer of {path} has no padding token; add one to its files.")
        config.pad_token_id = self.tokenizer.pad_token_id
        positions = getattr(config, "max_position_embeddings", self.tokenizer.model_max_length)
        self.max_tokens = min(positions, self.tokenizer.model_max_length)

    def padded(self, encoded: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Tokens of several texts as tensors [B, L], padded on the right."""
        return dict(self.tokenizer.pad(list(encoded), padding_side="right", return_tensors="pt"))

    def text(self, text: str) -> Any:
        """The tokens of a text; of one that is too long, the first ones."""
        self.tokenizer.truncation_side = "right"
        return self.tokenizer(text, truncation=True, max_length=self.max_tokens)

    def response(self, prompt: Prompt, text: str) -> Any:
        """The tokens of a prompt with its response; of those that are too long, the last ones."""
        self.tokenizer.truncation_side = "left"
        limit = {"truncation": True, "max_length": self.max_tokens}
        if not prompt.conversational:
            return self.tokenizer(prompt.text + text, **limit)
        if self.tokenizer.chat_template is None:
            return self.tokenizer(prompt.text, text, **limit)
        messages = [{"role": m["role"], "content": message_text(m)} for m in prompt.messages]
        messages.append({"role": "assistant", "content": text})
        try:
            rendered = self.tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError as error:  # templates refuse roles, such as system, or orders of roles
            raise VlarlError(f"the chat template of {self.path} refuses the conversation: {error}") from error
        return self.tokenizer(rendered, add_special_tokens=False, **limit)
