"""Artifacts on the Hugging Face Hub: their model card, how they get there and back, and what goes wrong on the way."""
