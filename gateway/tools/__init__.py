"""Tool calling: how a chat template has calls written, how they are read from an answer, and how an answer is
held to them. Knows nothing of any API's form.
"""
