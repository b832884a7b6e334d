"""Training of dual-mode adapters: a causal LM becomes a block-diffusion model beside itself."""
