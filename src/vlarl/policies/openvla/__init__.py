"""OpenVLA and OpenVLA-OFT, natively and at any size."""
