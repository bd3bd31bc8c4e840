"""Capture: routing traces from Hugging Face models. Needs torch and transformers."""
