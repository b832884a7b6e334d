"""How long a block pays: measured costs of this pair on this machine, and the lengths that follow from them."""
