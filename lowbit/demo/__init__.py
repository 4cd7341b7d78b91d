"""The demo: a small GPT, text to train it on, a training loop that resumes bit-exactly, and a report.

Nothing else in lowbit imports this package, except the command line. Start with ``experiment.py``.
"""
