"""Text from token ids, as they come, and stop strings in it. Chapter 11."""
