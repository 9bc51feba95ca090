"""Prompts: chat template, tokenizer, and the pool that keeps both off the event loop. Chapter 12."""
