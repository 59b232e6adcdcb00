"""Decoding: the engine and its round (draft, verify, accept, report), the exact sampler, text from tokens."""
