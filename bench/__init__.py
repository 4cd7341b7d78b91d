"""What lowbit measures about itself: ``python -m bench.run`` (``make bench``)."""
