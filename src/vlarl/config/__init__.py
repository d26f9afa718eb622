"""Configuration: the schema, files and flags, rules across sections, and derived values."""

from vlarl.config.derive import Derived, derive
from vlarl.config.finetune import FinetuneConfig
from vlarl.config.problems import ConfigError
from vlarl.config.schema import Config
from vlarl.config.source.load import load_config, to_yaml

__all__ = ["Config", "ConfigError", "Derived", "FinetuneConfig", "derive", "load_config", "to_yaml"]
