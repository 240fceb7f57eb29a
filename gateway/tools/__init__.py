"""Tool calling: how a model's chat template writes calls, how they are read from its answer, and how an answer
is held to them. Knows nothing of any API's form.
"""
