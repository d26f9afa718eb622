"""Language and vision-language models of transformers, whose decision is a text."""
