"""Language and vision-language models inside vLLM, by its own model classes."""
