"""The seam to Hugging Face: checkpoints to experts, models without experts, one key/value cache, and the two passes.

No modelling code of ours and no hooks: transformers' own forward runs, and its experts interface calls us.
"""
