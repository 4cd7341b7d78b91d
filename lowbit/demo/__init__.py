"""The demo: a small GPT, text to train it on, a training loop that resumes bit-exactly, and a report.

The library does without it; the command line runs it, and ``load_model`` builds its GPT where a file holds one. Start
with ``experiment.py``.
"""
