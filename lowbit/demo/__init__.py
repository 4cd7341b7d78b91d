"""The demo of ``lowbit train``: a small GPT, its text, a training loop with bit-identical resume, and a report.

The library does not need it, except that ``load_model`` builds its GPT for saved demo models. Start reading with
``experiment.py``.
"""
