"""Measurements of quality, size and speed of quantized real models, for ``lowbit evaluate``.

``models`` lists the models, and ``tasks`` defines quality for each kind of model. ``run`` measures each *cell* of the
table, a model with a recipe, in a separate process. ``report`` writes tables and a plot. Only the command line imports
this package; its dependencies are the extra ``lowbit[evaluate]``.
"""
