"""The demo: train a small language model through attnloom, on this machine, in minutes."""
