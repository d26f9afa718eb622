"""Episodes of an RLDS dataset as demonstrations."""

from __future__ import annotations

from vlarl.config.finetune import DemoConfig
from vlarl.data.recorded_demos import RecordedSource
from vlarl.data.rlds.declared import find_mapping
from vlarl.data.rlds.reader import STEPS, RldsDataset
from vlarl.data.rlds.writer import OBSERVATION

ACTION, STATE, INSTRUCTION = f"{STEPS}action", f"{OBSERVATION}state", f"{STEPS}language_instruction"
TERMINAL = f"{STEPS}is_terminal"


class RldsSource(RecordedSource):
    """An RLDS dataset, in as many of its views as a policy reads."""

    def __init__(
        self, config: DemoConfig, path: str, num_images: int, option: str = "demos.path", image_size: int = 224
    ) -> None:
        """`option` names the path in messages; `image_size` is that of views which are resized."""
        dataset = RldsDataset(path, config.split)
        mapping = find_mapping(config.mapping, dataset.name)
        super().__init__(config, dataset, mapping, num_images, option, image_size, dataset.name)
        self.dataset = RldsDataset(path, config.split, self.cameras)  # checks the images of these cameras alone
