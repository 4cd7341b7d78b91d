"""Models in the layouts of other programs, with codes and scales unchanged."""
