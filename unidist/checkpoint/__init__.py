"""Checkpoints: a folder of safetensors and JSON, written whole or not at all, loaded under any number of workers."""
