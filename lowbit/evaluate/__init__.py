"""Quality, size and speed of quantized real models: what ``lowbit evaluate`` measures.

``models`` names the models, ``tasks`` says what quality means for each kind, ``run`` measures a model with a recipe (a
*cell* of the table) in a process of its own, ``report`` makes tables and a plot of the cells. Nothing but the
command line imports this package, and what it needs beyond lowbit is the extra ``lowbit[evaluate]``.
"""
