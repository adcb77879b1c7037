"""How fast this machine decodes, next to what its memory allows and what stock PyTorch reaches: `fut-run bench`."""
