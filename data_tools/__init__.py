"""Offline work on data: raw images to shards, and generated picture sets."""
