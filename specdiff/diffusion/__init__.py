"""Native mode: diffusion language models decoding on their own."""
