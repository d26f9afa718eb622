"""OpenVLA inside vLLM: the model class, its configuration, its prompts and the plugin that registers them."""
