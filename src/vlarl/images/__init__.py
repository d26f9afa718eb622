"""Image operations, to the pixel as the original data pipelines do them."""
