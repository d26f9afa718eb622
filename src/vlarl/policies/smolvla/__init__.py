"""SmolVLA: a small vision-language model with an action expert that is trained by flow matching."""
