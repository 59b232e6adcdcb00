"""The packaged demo: a small model trained on GSM8K by training/train_demo.py, and real test questions for it."""
